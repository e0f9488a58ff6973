# SPDX-License-Identifier: Apache-2.0
"""The reference against hand-computed cases and against brute force."""

import json
import math
import random

import pytest
import torch

from tests.reference import ReferenceModel, attention, engram, formats, layers, random_checkpoint
from tests.reference.runs import Span
from tests.reference.weights import plan_layers

F64 = torch.float64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint.write(tmp_path_factory.mktemp("ref") / "tiny", seed=3)


@pytest.fixture(scope="module")
def model(checkpoint):
    return ReferenceModel(checkpoint)


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


# -- hyper-connections, MoE -----------------------------------------------------------------


def test_sinkhorn_sums():
    comb = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    out = layers.sinkhorn(comb, 20, 1e-6)
    assert (out.sum(-2) - 1).abs().max() < 2e-6 and (out.sum(-1) - 1).abs().max() < 1e-4
    once = (comb.exp() / comb.exp().sum(-1, keepdim=True)) + 1e-6
    once = once / (once.sum(-2, keepdim=True) + 1e-6)
    assert torch.allclose(layers.sinkhorn(comb, 1, 1e-6), once)


def test_mix_and_spread_by_hand(model):
    X = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(1), dtype=F64)
    y, post = torch.ones(2, 128, dtype=F64), torch.tensor([[1.0, 2, 3, 4]] * 2, dtype=F64)
    comb = torch.zeros(2, 4, 4, dtype=F64)
    comb[:, 0, 1] = 5  # from copy 0 into copy 1
    out = layers.Ops.spread(X, y, post, comb)
    assert torch.allclose(out[:, 1], 2 + 5 * X[:, 0]) and torch.allclose(out[:, 2], y * 3)
    pre, post, comb = model.ops.mix(X, "layers.3.hc_ffn")
    w, f = model.weights, X[1].flatten()
    m = [float(row @ f) / math.sqrt(float(f @ f) / 512) for row in w.plain("layers.3.hc_ffn_fn")]
    scale, base = w.plain("layers.3.hc_ffn_scale"), w.plain("layers.3.hc_ffn_base")
    for i in range(4):
        a, b = (float(m[k] * scale[k // 4] + base[k]) for k in (i, 4 + i))
        assert float(pre[1, i]) == pytest.approx(1 / (1 + math.exp(-a)) + 1e-6)
        assert float(post[1, i]) == pytest.approx(2 / (1 + math.exp(-b)))


def test_router_bias_chooses_but_does_not_weigh(model):
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(2), dtype=F64)
    index, weight = model.ops.route(x, "layers.0.ffn.gate", 2)
    gate, bias = (model.weights.plain(f"layers.0.ffn.gate.{n}") for n in ("weight", "bias"))
    for t in range(9):
        s = [math.sqrt(math.log1p(math.exp(float(row @ x[t])))) for row in gate]
        order = sorted(range(8), key=lambda e: -(s[e] + float(bias[e])))[:2]
        assert index[t].tolist() == order
        expect = [1.5 * s[e] / sum(s[o] for o in order) for e in order]
        assert weight[t].tolist() == pytest.approx(expect)


def test_expert_clamps_and_weighs_before_w2(model):
    ops, p = layers.Ops(model.config, model.weights, False), "layers.0.ffn.experts.1"
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4), dtype=F64) * 20
    w1, w2, w3 = (model.weights.matrix(f"{p}.{n}") for n in ("w1", "w2", "w3"))
    g, u = x @ w1.T, x @ w3.T
    assert g.max() > 10 and g.min() < -10 and u.max() > 10 and u.min() < -10
    h = g.clamp(max=10) / (1 + (-g.clamp(max=10)).exp()) * u.clamp(-10, 10)
    weight = torch.tensor([0.3, 1.0, 2.0], dtype=F64)
    assert torch.allclose(ops.expert(p, x, weight), (h * weight[:, None]) @ w2.T)
    q = formats.quant_fp8  # the quantised path differs from weighing afterwards
    assert torch.equal(model.ops.linear(f"{p}.w2", h), q(h) @ w2.T)


def test_ties_go_to_the_lower_index():
    scores = torch.tensor([[1.0, 3, 3, 2, 3], [-torch.inf, 0.0, -torch.inf, 0.0, 0.0]])
    assert layers.top_lowest_first(scores, 2).tolist() == [[1, 2], [1, 3]]
    assert attention._mark_best(scores, 4)[1].tolist() == [False, True, False, True, True]


# -- attention ------------------------------------------------------------------------------


def test_attend_by_hand(model, monkeypatch):
    g = torch.Generator().manual_seed(5)
    T, n = 21, 10
    q = torch.randn(T, 4, 64, generator=g, dtype=F64)
    kv, rows = (torch.randn(k, 64, generator=g, dtype=F64) for k in (T, n))
    sink = torch.tensor([0.0, -3, 2, 9], dtype=F64)
    chosen = torch.rand(T, n, generator=g) < 0.4
    got = model.attention.attend(q, kv, rows, chosen, sink)
    for t in range(T):
        use = [kv[s] for s in range(max(0, t - 7), t + 1)]
        use += [rows[j] for j in range(n) if chosen[t, j]]
        for h in range(4):
            e = [math.exp(float(q[t, h] @ r) / 8) for r in use]
            o = sum(x * r for x, r in zip(e, use, strict=True))
            assert torch.allclose(got[t, h], o / (sum(e) + sink[h].exp()), atol=1e-12)
    monkeypatch.setattr(attention, "_QUERIES_AT_ONCE", 4)
    assert torch.allclose(model.attention.attend(q, kv, rows, chosen, sink), got, atol=1e-13)


def test_window_edges(tmp_path):
    """One window-only layer: a token reaches exactly the 8 positions from its own on."""
    d = random_checkpoint.write(tmp_path / "w", num_hidden_layers=1, engram_layer_ids=[],
                                engram_num_embeddings=[])  # fmt: skip
    m, a = ReferenceModel(d), prompt(20)
    b = [*a[:3], a[3] ^ 1, *a[4:]]
    moved = (m.logits(a) - m.logits(b)).abs().amax(-1)
    assert (moved > 1e-6).nonzero().flatten().tolist() == list(range(3, 11))


def test_causality(model):
    a = prompt(41, 7)
    base = model.logits(a)
    for t in (0, 1, 17, 24, 39, 40):
        moved = (model.logits([*a[:t], a[t] ^ 1, *a[t + 1 :]]) - base).abs().amax(-1)
        assert (moved[:t] < 1e-11).all() and moved[t] > 1e-6
    assert (model.logits(a[:30]) - base[:30]).abs().max() < 1e-11


def test_visibility_and_counts(model):
    notes = model.trace(prompt(37))
    for layer, ratio in ((2, 2), (3, 2), (4, 2), (5, 1), (6, 1), (7, 1)):
        for pos in range(37):
            n = (pos + 1) // ratio
            picked = [r for r in notes[layer]["selected"][pos].tolist() if r >= 0]
            assert len(picked) == min(4, n) and picked == sorted(set(picked))
            assert all(r < n for r in picked)
            if layer != 7:
                assert torch.isfinite(notes[layer]["scores"][pos]).nonzero().numel() == n
    assert torch.equal(notes[3]["selected"], notes[2]["selected"])
    assert torch.equal(notes[6]["selected"], notes[5]["selected"])


def test_candidates_filter(model):
    notes = model.trace(prompt(60, 2))
    blocks, scores = notes[5]["candidate_blocks"], notes[5]["scores"]
    outside_5 = 0
    for pos in range(60):
        best = [float(scores[pos, 2 * b : 2 * b + 2].max()) for b in range(30)]
        best[pos // 2] = math.inf
        live = [b for b in range(30) if best[b] > -math.inf]
        keep = sorted(sorted(live, key=lambda b: (-best[b], b))[:4])
        assert blocks[pos].nonzero().flatten().tolist() == keep and pos // 2 in keep
        assert all(r // 2 in keep for r in notes[7]["selected"][pos].tolist() if r >= 0)
        outside_5 += any(r // 2 not in keep for r in notes[5]["selected"][pos].tolist() if r >= 0)
    attn, c = model.attention, model.config
    x = torch.randn(60, c.hidden_size, generator=torch.Generator().manual_seed(0), dtype=F64)
    qr = torch.randn(60, c.q_lora_rank, generator=torch.Generator().manual_seed(1), dtype=F64)
    key = torch.randn(60, c.index_head_dim, generator=torch.Generator().manual_seed(2), dtype=F64)
    pos, layer = torch.arange(60), model.layers[7]
    free = attn.choose(x, qr, pos, layer, key, None).chosen
    held = attn.choose(x, qr, pos, layer, key, blocks).chosen
    assert torch.equal(free[:8], held[:8]) and (free[9:] != held[9:]).any()


def test_compressor_pairs(model):
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(3), dtype=F64)
    latent = model.attention.latents(x, model.layers[2])
    assert latent.shape == (3, 64)
    p = "layers.2.attn.compressor"
    w, gate = model.weights.matrix(f"{p}.wkv"), model.weights.matrix(f"{p}.wgate")
    a, g = x[2:4] @ w.T, x[2:4] @ gate.T
    share = 1 / (1 + (g[1] - g[0]).exp())
    row = a[0] * share + a[1] * (1 - share)
    row = row / row.square().mean().sqrt() * model.weights.plain(f"{p}.norm.weight")
    assert torch.allclose(latent[1], row)
    assert model.attention.latents(x, model.layers[5]).shape == (7, 64)


def test_sources_of_the_released_layout():
    from types import SimpleNamespace

    c = SimpleNamespace(
        num_hidden_layers=40, compress_ratios=[0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        kv_source_layer_ids=[2, 8, 14, 20], index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        candidate_source_layer_id=20, engram_layer_ids=[1, 14],
    )  # fmt: skip
    plan = plan_layers(c)
    assert [p.index for p in plan if p.restricted] == [24, 28, 32, 36]
    assert [p.kv_source for p in plan] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [plan[i].index_source for i in (7, 19, 23, 24, 39)] == [2, 14, 20, 24, 36]
    assert [p.engram for p in plan if p.engram is not None] == [0, 1]


# -- Engram ---------------------------------------------------------------------------------


def test_engram_constants_of_the_release():
    first = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    second = [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert engram.multipliers(1, 4, 99092) == first
    assert engram.multipliers(14, 4, 99092) == second
    p = engram.primes(2, 3, 8, 16_000_000)
    assert p[0][0][:3] == [16000057, 16000079, 16000081]
    assert p[1][0][0] == 16000477 and p[1][2][7] == 16000889
    assert [sum(map(sum, layer)) for layer in p] == [384006168, 384016682]


def test_engram_hash_by_hand(model):
    e, ids = model.engram, [10, 300, 11, 12]
    m, pad = engram.multipliers(4, 4, 512), model.engram.class_of[2]
    u = [e.class_of[t] for t in ids]
    got = e.rows(ids, 1)
    x = u[1] * m[0] ^ u[0] * m[1]
    assert got[1, :2].tolist() == [x % 127, x % 131 + 127]
    x ^= pad * m[2]
    assert got[1, 2:4].tolist() == [x % 137 + 258, x % 139 + 395]
    x = u[3] * m[0] ^ u[2] * m[1] ^ u[1] * m[2] ^ u[0] * m[3]
    assert got[3, 4:].tolist() == [x % 149 + 534, x % 151 + 683]


def test_engram_looks_back_three_tokens(model):
    a = prompt(20)
    b = [*a[:6], 200 if model.engram.class_of[a[6]] != model.engram.class_of[200] else 201, *a[7:]]
    differ = (model.engram.rows(a, 0) != model.engram.rows(b, 0)).view(20, 3, 2).any(-1)
    assert differ.any(-1).nonzero().flatten().tolist() == [6, 7, 8, 9]
    assert differ[7:10].int().tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]


def test_engram_gate_by_hand(model):
    X = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(6), dtype=F64)
    rows = model.engram.rows([9, 8], 0)
    w, p = model.weights, "layers.1.engram"
    table = w.raw(f"{p}.embed.weight").float().double()
    raw = w.raw(f"{p}.embed.scale").view(torch.uint8).int()
    gathered = torch.cat([table[r] * 2.0 ** (int(raw[r, 0]) - 127) for r in rows[1].tolist()])
    out = formats.quant_fp8(gathered[None])[0] @ w.matrix(f"{p}.wkv").T
    got = model.engram.inject(X, rows, 1, model.ops.linear, model.ops.rms)
    for h in range(4):
        a, key = X[1, h], out[128 * h : 128 * h + 128]
        qw, kw = w.plain(f"{p}.q_weight")[h], w.plain(f"{p}.k_weight")[h]
        d = float((a * qw * kw * key).sum())
        d /= math.sqrt(float(a @ a) * float(key @ key)) / 128 * math.sqrt(128)
        gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
        assert torch.allclose(got[1, h], a + gate * out[512:])


def test_token_classes(checkpoint):
    cases = {" The": "the", "  a\t\nb ": "a b", " ": " ", "\n": " ", "É": "e", "ﬁ": "fi"}
    cases |= {"ΑΣ": "ασ", "\x0b": "", "\u3000x": "x", "가": "\u1100\u1161", "\x1c": "\x1c"}
    assert {k: engram.normalise(k) for k in cases} == cases
    ids, count = engram.compressed_ids(checkpoint, 512)
    tok = random_checkpoint.tokenizer()
    words = [tok.token_to_id(w) for w in ("The", "the", "ĠThe", "Ġthe", "THE")]
    assert len({ids[w] for w in words}) == 1
    spaces = [tok.token_to_id(w) for w in ("Ġ", "ĠĠ", "Ċ")]
    assert len({ids[w] for w in spaces}) == 1
    halves = [i for i in range(3, 259) if "\ufffd" in tok.decode([i])]
    assert len(halves) == 128 and len({ids[i] for i in halves}) == 128
    assert count <= len(set(ids)) <= count + 1 and len({ids[i] for i in range(400, 512)}) == 1


# -- the whole ------------------------------------------------------------------------------


def test_mixes_are_used_one_sublayer_late(model):
    """Layer 0 reads copy 0 alone; the head reads the copies by the last FFN's own mix."""
    ids, c, w = prompt(12), model.config, model.weights
    notes = model.trace(ids)

    def rms_norm(x, name):
        return x / x.square().mean(-1, keepdim=True).sqrt() * w.plain(f"{name}.weight")

    embedded = w.plain("embed.weight")[ids]
    X = notes[0]["stream_in"]
    assert torch.equal(X, embedded[:, None].expand(-1, c.hc_mult, -1))
    span = Span(torch.arange(12), cut=5)
    y = model.attention(rms_norm(embedded, "layers.0.attn_norm"), model.layers[0], span)
    pre, post, comb = model.ops.mix(X, "layers.0.hc_attn")
    mid = model.ops.spread(X, y, post, comb)
    assert torch.allclose(notes[0]["stream_mid"], mid)
    h = rms_norm((pre[..., None] * mid).sum(1), "layers.0.ffn_norm")
    y, _ = model.ops.moe(h, "layers.0.ffn", 2)
    _, post, comb = model.ops.mix(mid, "layers.0.hc_ffn")
    assert torch.allclose(notes[0]["stream_out"], model.ops.spread(mid, y, post, comb))
    pre, _, _ = model.ops.mix(notes[7]["stream_mid"], "layers.7.hc_ffn")
    last = rms_norm((pre[..., None] * notes[7]["stream_out"]).sum(1), "norm")
    assert torch.allclose(model.logits(ids), last @ w.plain("head.weight").T)


def test_greedy_and_its_check_agree(model):
    tokens, gaps = model.greedy(prompt(30), 12)
    again, gaps_again = model.check_greedy(prompt(30), tokens)
    assert again == tokens and gaps_again == pytest.approx(gaps, abs=1e-9)
    assert torch.allclose(model.logprobs(prompt(9)).exp().sum(-1), torch.ones(9, dtype=F64))


def test_switches(checkpoint, model):
    base = model.logits(prompt(40))
    lazy = ReferenceModel(checkpoint, cache_weights=False)
    assert torch.equal(lazy.logits(prompt(40)), base) and lazy.weights.cache is None
    for off in ({"activation_quant": False}, {"kv_quant": False}, {"index_quant": False},
                {"kv_format": "v4"}):  # fmt: skip
        moved = (ReferenceModel(checkpoint, **off).logits(prompt(40)) - base).abs()
        assert 1e-6 < moved.max() and moved.mean() < base.std()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(model, length):
    assert model.logits(prompt(length)).isfinite().all()


def test_large_tables_are_read_by_row(model, monkeypatch):
    rows = torch.tensor([5, 0, 629, 5])
    whole = model.weights.table_rows("layers.1.engram.embed", rows)
    monkeypatch.setattr("tests.reference.weights._WHOLE_TABLE_BYTES", 0)
    assert torch.equal(model.weights.table_rows("layers.1.engram.embed", rows), whole)


def test_refusals(checkpoint, model, tmp_path):
    for bad in ([], [1, 511], [512], [-1]):
        with pytest.raises(ValueError, match="token_ids"):
            model.logits(bad)
    with pytest.raises(ValueError, match="kv_format"):
        ReferenceModel(checkpoint, kv_format="v5")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    with pytest.raises(ValueError, match="text_config"):
        ReferenceModel(tmp_path)
