# SPDX-License-Identifier: Apache-2.0
"""The reference's bounded replay: what each row may see, and what must not change."""

import math

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from tests.reference import GlobalRows, ReferenceModel, Replay, random_checkpoint
from tests.reference.runs import Span

W, LAYERS, CUT = 8, 8, 5
REACH = W - 1  # a layer passes on what its window holds, so far back
SAME = 1e-11


@pytest.fixture(scope="module")
def model(tmp_path_factory, run_seed):
    return ReferenceModel(write_tiny(tmp_path_factory.mktemp("replay") / "tiny", seed=run_seed))


@pytest.fixture
def draw(model, run_rng):
    ids = [i for i in range(model.config.vocab_size) if i != model.config.image_token_id]
    return lambda n: [run_rng.choice(ids) for _ in range(n)]


def moved(a, b):
    return (a - b).abs().flatten(1).amax(-1)


def other(model, token):
    """A token of another Engram class, so that the n-grams of ``token`` change too."""
    kind, image = model.engram.class_of, model.config.image_token_id
    return next(t for t in range(5, 500) if kind[t] != kind[token] and t != image)


def test_nothing_clamped_is_the_plain_run(model, draw, run_rng):
    ids = draw(60)
    plain = model.run(ids)
    assert plain.start == 0 and len(plain.features) == len(plain.hidden) == 60
    again = model.run(ids, decoder_start=0, replay=Replay(0, 0))
    assert torch.equal(again.hidden, plain.hidden) and torch.equal(again.features, plain.features)
    for hit in (2, 2 * run_rng.randrange(2, 28), 58):
        run = model.run(ids, replay=Replay(0, hit, plain.published))
        assert moved(run.hidden, plain.hidden).max() < SAME
        assert moved(run.features, plain.features).max() < SAME


def test_a_long_replay_becomes_exact(model, draw, run_rng):
    """Past the reach of all windows nothing is left of the truncation, if all else is right."""
    start = run_rng.randrange(5, 20)
    exact = start + LAYERS * REACH
    hit, ids = exact + exact % 2 + 4, draw(exact + 30)
    plain = model.run(ids)
    run = model.run(ids, replay=Replay(start, hit, plain.published))
    assert run.start == start and len(run.hidden) == len(ids) - start
    assert moved(run.hidden[exact - start :], plain.hidden[exact:]).max() < SAME
    assert moved(run.features[exact - start :], plain.features[exact:]).max() < SAME
    assert moved(run.hidden, plain.hidden[start:])[:REACH].max() > 1e-3
    for source, rows in run.published.items():
        assert torch.allclose(rows.kv, plain.published[source].kv, rtol=0, atol=SAME)
        assert torch.allclose(rows.key, plain.published[source].key, rtol=0, atol=SAME)


def test_the_hit_keeps_its_global_rows(model, draw, run_rng):
    start = 2 * run_rng.randrange(2, 15)
    hit, ids = start + W, draw(start + 50)
    plain = model.run(ids).published
    run = model.run(ids, replay=Replay(start, hit, plain)).published
    for source, ratio in ((2, 2), (4, 2), (5, 1)):
        assert run[source].kv.shape == plain[source].kv.shape
        assert run[source].key.shape == plain[source].key.shape
        assert torch.equal(run[source].kv[: hit // ratio], plain[source].kv[: hit // ratio])
        assert torch.equal(run[source].key[: hit // ratio], plain[source].key[: hit // ratio])
    # Two window-only layers lie below layer 2, so its rows are exact again 2 REACH later.
    gone = moved(run[2].kv, plain[2].kv)
    assert gone[hit // 2 : (start + 2 * REACH) // 2].max() > 1e-3
    assert gone[start // 2 + REACH :].max() < SAME


def test_the_hit_reaches_rows_only_through_what_is_cached(model, draw, run_rng):
    start, ids = 2 * run_rng.randrange(8, 14), draw(60)
    cached = model.run(ids).published
    base = model.run(ids, replay=Replay(start, start + W, cached)).hidden
    for at in (0, run_rng.randrange(1, start - 4), start - 4):  # Engram reads three tokens back
        changed = [*ids[:at], other(model, ids[at]), *ids[at + 1 :]]
        run = model.run(changed, replay=Replay(start, start + W, cached))
        assert torch.equal(run.hidden, base)
    for at in (start - 1, start):
        changed = [*ids[:at], other(model, ids[at]), *ids[at + 1 :]]
        run = model.run(changed, replay=Replay(start, start + W, cached))
        assert moved(run.hidden, base)[0] > 1e-6
    strange = model.run(draw(60)).published
    run = model.run(ids, replay=Replay(start, start + W, strange))
    assert moved(run.hidden, base).min() > 1e-6


def test_engram_reads_the_hit(model, draw):
    ids = draw(30)
    cached = model.run(ids).published
    plain, late = model.trace(ids), model.trace(ids, replay=Replay(11, 18, cached))
    for layer in (1, 4):
        assert torch.equal(late[layer]["engram_rows"], plain[layer]["engram_rows"][11:])


def test_visible_rows_count_from_the_sequence(model, draw):
    ids = draw(47)
    notes = model.trace(ids, replay=Replay(12, 20, model.run(ids).published))
    for layer, ratio in ((2, 2), (4, 2), (5, 1)):
        n = torch.isfinite(notes[layer]["scores"]).sum(1)
        assert n.tolist() == [(pos + 1) // ratio for pos in range(12, 47)]


def test_windows_alone_cannot_tell_a_replay_from_a_new_sequence(tmp_path, run_rng, run_seed):
    """RoPE is relative: without roundings, Engram and global rows only the windows remain."""
    d = random_checkpoint.write(
        tmp_path / "w", seed=run_seed, num_hidden_layers=2, engram_layer_ids=[],
        engram_num_embeddings=[], kv_source_layer_ids=[], index_source_layer_ids=[],
    )  # fmt: skip
    m = ReferenceModel(d, activation_quant=False, kv_quant=False)
    ids, start = [run_rng.randrange(500) for _ in range(40)], run_rng.randrange(1, 20)
    late = m.logits(ids, replay=Replay(start, start + 2))
    assert moved(late, m.logits(ids[start:])).max() < 1e-9
    gone = moved(late, m.logits(ids)[start:])
    assert gone[0] > 1e-3 and gone[2 * REACH :].max() < SAME


def test_a_hit_on_a_hit(model, draw, run_rng):
    ids = draw(120)
    first = 2 * run_rng.randrange(4, 10)
    old = model.run(ids[:100], replay=Replay(first, first + W, model.run(ids[:40]).published))
    whole = model.run(ids, replay=Replay(first, first + W, old.published))
    start = first + 20
    exact = start + LAYERS * REACH
    run = model.run(ids, replay=Replay(start, exact + exact % 2, old.published))
    assert moved(run.hidden[exact - start :], whole.hidden[exact - first :]).max() < SAME
    assert moved(run.hidden[exact - start :], model.run(ids).hidden[exact:]).max() > 1e-6


@pytest.mark.parametrize("replayed", [False, True])
def test_decoder_start_narrows_the_decoder_alone(model, draw, run_rng, replayed):
    """Layers 6 and 7 follow the cut: exact inputs at 6, so exact again REACH and 2 REACH later."""
    ids, R = draw(70), run_rng.randrange(25, 40)
    replay = Replay(10, 18, model.run(ids).published) if replayed else Replay(0, 0)
    s = replay.start
    plain = model.run(ids, replay=replay)
    run = model.run(ids, replay=replay, decoder_start=R)
    for source, rows in plain.published.items():
        assert torch.equal(run.published[source].kv, rows.kv)
        assert torch.equal(run.published[source].key, rows.key)
    got, want = (r.features.split(model.config.hidden_size, 1) for r in (run, plain))
    assert torch.equal(got[0], want[0])  # the entry of layer 6
    gone = moved(got[1], want[1])  # and of layer 7
    assert gone[: R - s + REACH].min() > 1e-6 and gone[R - s + REACH :].max() < SAME
    gone = moved(run.hidden, plain.hidden)
    assert gone[: R - s + 2 * REACH - 1].min() > 1e-9 and gone[R - s + 2 * REACH :].max() < SAME
    assert torch.equal(model.run(ids, replay=replay, decoder_start=s).hidden, plain.hidden)


def test_rows_below_decoder_start_have_no_window(model, draw):
    """Then their output cannot depend on where exactly it lies."""
    ids = draw(40)
    near, far = (model.run(ids, decoder_start=R).hidden for R in (20, 1000))
    assert torch.equal(near[:20], far[:20]) and moved(near, far)[20] > 1e-6


@pytest.mark.parametrize("replay_start", [0, 14])
def test_dropping_rows_at_the_cut_gives_the_same(model, draw, run_rng, replay_start):
    """The kept rows alone through the decoder, as a compact engine runs them."""
    ids, R = draw(60), run_rng.randrange(30, 45)
    replay = Replay(replay_start, replay_start + W, model.run(ids).published)
    mask = model.run(ids, replay=replay, decoder_start=R)

    pos = torch.arange(replay_start, 60)
    span = Span(pos, CUT, replay)
    X, pre = model.embed(ids[replay_start:])
    for layer in model.layers[: CUT + 1]:
        if layer.engram is not None:
            rows = model.engram.rows(ids, layer.engram)[replay_start:]
            X = model.engram.inject(X, rows, layer.index, model.ops.linear, model.ops.rms)
        X, pre = model.layer(layer, X, pre, span)
    keep = pos >= R
    choice = span.choices[CUT]
    choice.chosen, choice.blocks = choice.chosen[keep], choice.blocks[keep]
    kept = Span(pos[keep], CUT, Replay(R, R), 0, span.published, span.choices)
    X, pre = X[keep], pre[keep]
    for layer in model.layers[CUT + 1 :]:
        X, pre = model.layer(layer, X, pre, kept)
    hidden = model.ops.collapse(X, pre, "norm")
    assert moved(hidden, mask.hidden[R - replay_start :]).max() < SAME


def test_attend_by_hand_from_a_start(model, run_seed):
    g = torch.Generator().manual_seed(run_seed)
    T, n, start = 14, 5, 6
    q = torch.randn(T, 4, 64, generator=g, dtype=torch.float64)
    kv, rows = (torch.randn(k, 64, generator=g, dtype=torch.float64) for k in (T, n))
    sink = torch.tensor([0.0, -3, 2, 9], dtype=torch.float64)
    chosen = torch.rand(T, n, generator=g) < 0.5
    chosen[2] = False  # nothing at all: the sink takes everything
    got = model.attention.attend(q, kv, rows, chosen, sink, start)
    assert (got[2] == 0).all()
    for t in range(T):
        use = [kv[s] for s in range(max(start, t - 7), t + 1)]
        use += [rows[j] for j in range(n) if chosen[t, j]]
        for h in range(4):
            e = [math.exp(float(q[t, h] @ r) / 8) for r in use]
            o = sum(x * r for x, r in zip(e, use, strict=True)) / (sum(e) + sink[h].exp())
            assert torch.allclose(got[t, h], torch.as_tensor(o).double(), atol=1e-12)


def test_greedy_after_a_hit(model, draw):
    prompt, tokens = draw(30), draw(4)
    where = {"replay": Replay(12, 20, model.run(prompt).published), "decoder_start": 18}
    best, gaps = model.check_greedy(prompt, tokens, **where)
    for i in range(4):
        token, gap = model.greedy([*prompt, *tokens[:i]], 1, **where)
        assert token == [best[i]] and gap == pytest.approx([gaps[i]], abs=1e-9)
    assert model.check_greedy(prompt, tokens)[1] != pytest.approx(gaps, abs=1e-9)


def test_refusals(model, draw):
    ids = draw(20)
    cached = model.run(ids[:9]).published
    for replay, match in (
        (Replay(4, 7, cached), "splits a group"),
        (Replay(8, 6, cached), "start"),
        (Replay(-1, 6, cached), "start"),
        (Replay(0, 20, cached), "tokens"),
        (Replay(2, 10, cached), "of layer 2"),
        (Replay(0, 2, {2: cached[2], 4: cached[4]}), "of layer 5"),
        (Replay(0, 4, cached | {5: GlobalRows(*(v[:3] for v in vars(cached[5]).values()))}), "5"),
    ):
        with pytest.raises(ValueError, match=match):
            model.run(ids, replay=replay)
