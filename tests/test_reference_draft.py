# SPDX-License-Identifier: Apache-2.0
"""The reference's draft against a second, loop-by-loop writing of facts 8, and by probes."""

import math

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from tests.reference import ReferenceDraft, ReferenceModel, formats

W, K, D = 8, 3, 128
F64 = torch.float64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, run_seed):
    folder = tmp_path_factory.mktemp("draft") / "tiny"
    other_than_the_target = {"dspark_num_experts_per_tok": 3}
    return write_tiny(folder, seed=run_seed, overrides=other_than_the_target)


@pytest.fixture(scope="module")
def draft(checkpoint):
    return ReferenceDraft(ReferenceModel(checkpoint))


@pytest.fixture
def draw(draft, run_rng):
    ids = [i for i in range(draft.c.vocab_size) if i != draft.c.image_token_id]
    return lambda n: [run_rng.choice(ids) for _ in range(n)]


# -- a second writing -----------------------------------------------------------------------


def turn(row, pos, sign):
    """RoPE of the last 16 numbers as complex multiplication; theta 10000, no YaRN."""
    z = torch.view_as_complex(row[-16:].reshape(8, 2).contiguous())
    angle = torch.tensor([sign * pos * 10000 ** (-i / 8) for i in range(8)], dtype=F64)
    z = z * torch.polar(torch.ones(8, dtype=F64), angle)
    return torch.cat([row[:-16], torch.view_as_real(z).flatten()])


class ByHand:
    """One proposal, a row and a head at a time; every rounding on."""

    def __init__(self, draft, kv_format):
        self.w, self.mix, self.v4 = draft.w, draft.ops.mix, kv_format == "v4"

    def norm(self, x, name):
        return x / math.sqrt(float(x @ x) / len(x)) * self.w.plain(f"{name}.weight")

    def linear(self, name, x):
        return self.w.matrix(name) @ formats.quant_fp8(x)

    def kv(self, p, x, pos):
        row = turn(self.norm(self.linear(f"{p}.wkv", x), f"{p}.kv_norm"), pos, 1)
        return formats.quant_v4_record(row, 16) if self.v4 else formats.quant_fp8(row)

    def attention(self, p, main, first, rows):
        ap1 = first + len(main)
        keys = [self.kv(p, m, first + i) for i, m in enumerate(main)]
        keys += [self.kv(p, x, ap1 + i) for i, x in enumerate(rows)]
        out = []
        for i, x in enumerate(rows):
            qr = self.norm(self.linear(f"{p}.wq_a", x), f"{p}.q_norm")
            heads = []
            for h, q in enumerate(self.linear(f"{p}.wq_b", qr).view(4, 64)):
                q = turn(q, ap1 + i, 1)
                e = [math.exp(float(q @ key) / 8) for key in keys]
                total = sum(e) + math.exp(float(self.w.plain(f"{p}.attn_sink")[h]))
                o = sum(a * key for a, key in zip(e, keys, strict=True)) / total
                heads.append(turn(o, ap1 + i, -1))
            wo_a = self.w.matrix(f"{p}.wo_a")
            z = [wo_a[32 * g : 32 * g + 32] @ torch.cat(heads[2 * g : 2 * g + 2]) for g in (0, 1)]
            out.append(self.linear(f"{p}.wo_b", torch.cat(z)))
        return out

    def expert(self, p, x, weight):
        gate = self.linear(f"{p}.w1", x).clamp(max=10)
        h = gate / (1 + (-gate).exp()) * self.linear(f"{p}.w3", x).clamp(-10, 10) * weight
        return self.linear(f"{p}.w2", h)

    def moe(self, p, x):
        bias = self.w.plain(f"{p}.gate.bias")
        s = [math.sqrt(math.log1p(math.exp(float(g)))) for g in self.w.matrix(f"{p}.gate") @ x]
        best = sorted(range(4), key=lambda e: (-(s[e] + float(bias[e])), e))[:3]
        total = sum(s[e] for e in best)
        y = self.expert(f"{p}.shared_experts", x, 1.0)
        return y + sum(self.expert(f"{p}.experts.{e}", x, 1.5 * s[e] / total) for e in best)

    def sublayer(self, X, pre, p, kind, f):
        rows = [self.norm(pre[i] @ X[i], f"{p}.{kind}_norm") for i in range(len(X))]
        next_pre, post, comb = self.mix(X, f"{p}.hc_{kind}")
        y = f(rows)
        X = [[post[t, j] * y[t] + comb[t, :, j] @ X[t] for j in range(4)] for t in range(len(y))]
        return torch.stack([torch.stack(row) for row in X]), next_pre

    def __call__(self, features, first, anchor, noise, k):
        """Lists of k rows: base logits, logits; and tokens, confidence."""
        main = [self.norm(self.linear("mtp.0.main_proj", f), "mtp.0.main_norm") for f in features]
        embed = self.w.plain("embed.weight")
        X = torch.stack([embed[t].repeat(4, 1) for t in (anchor, *[noise] * (k - 1))])
        pre = torch.tensor([[1.0, 0, 0, 0]] * k, dtype=F64)
        for p in ("mtp.0", "mtp.1"):
            attend = lambda rows: self.attention(f"{p}.attn", main, first, rows)  # noqa: E731, B023
            X, pre = self.sublayer(X, pre, p, "attn", attend)
            moe = lambda rows: [self.moe(f"{p}.ffn", x) for x in rows]  # noqa: E731, B023
            X, pre = self.sublayer(X, pre, p, "ffn", moe)
        base, logits, tokens, confidence = [], [], [], []
        for i in range(k):
            hb = pre[i] @ X[i]
            base.append(self.w.plain("head.weight") @ self.norm(hb, "mtp.1.norm"))
            e = self.w.plain("mtp.1.markov_head.embed.weight")[tokens[-1] if tokens else anchor]
            logits.append(base[-1] + self.w.plain("mtp.1.markov_head.head.weight") @ e)
            tokens.append(int(logits[-1].argmax()))
            proj = self.w.plain("mtp.1.confidence_head.proj.weight")[0]
            confidence.append(1 / (1 + math.exp(-float(proj[:D] @ hb + proj[D:] @ e))))
        return base, logits, tokens, confidence


@pytest.mark.parametrize("kv_format", ["v41", "v4"])
def test_a_proposal_by_hand(checkpoint, draw, run_rng, kv_format):
    draft = ReferenceDraft(ReferenceModel(checkpoint, kv_format=kv_format))
    assert draft.w.matrix("mtp.0.ffn.gate").shape == (4, D)
    ids, (anchor,) = draw(run_rng.randrange(12, 30)), draw(1)
    features, noise, late = draft.features(ids), draft.c.dspark_noise_token_id, len(ids) - 5
    for k, start in ((K, 0), (K, late), (2, 0), (1, late)):
        got = draft.propose(ids, anchor, k=k, features=features, window_start=start)
        first = max(start, len(ids) - W)
        by_hand = ByHand(draft, kv_format)
        base, logits, tokens, confidence = by_hand(features[first:], first, anchor, noise, k)
        assert got.base_logits.shape == (k, draft.c.vocab_size)
        assert torch.allclose(got.base_logits, torch.stack(base), rtol=0, atol=1e-9)
        assert torch.allclose(got.logits, torch.stack(logits), rtol=0, atol=1e-9)
        assert got.tokens == tokens and got.confidence.tolist() == pytest.approx(confidence)
        for row, gap in zip(got.logits, got.gaps, strict=True):
            best = sorted(row.tolist())
            assert gap == pytest.approx(best[-1] - best[-2], abs=1e-12)


# -- what a block sees ----------------------------------------------------------------------


def test_every_row_sees_the_same_context(draft, draw, run_rng, run_seed):
    n = run_rng.randrange(12, 25)
    ids, (anchor,) = draw(n), draw(1)
    features = draft.features(ids)
    step = torch.randn(features.shape[1], generator=torch.Generator().manual_seed(run_seed))
    for start in (0, n - 3, n):
        base = draft.propose(ids, anchor, features=features, window_start=start).base_logits
        for at in range(n):
            changed = features.clone()
            changed[at] += 5 * step.double()
            got = draft.propose(ids, anchor, features=changed, window_start=start).base_logits
            gone = (got - base).abs().amax(1)
            if at >= max(start, n - W):
                assert gone.min() > 1e-9, (start, at)
            else:
                assert gone.max() == 0, (start, at)


def test_every_row_sees_the_whole_block(draft, run_seed):
    g = torch.Generator().manual_seed(run_seed)
    main, x = (torch.randn(n, D, generator=g, dtype=F64) for n in (W, K))
    base = draft.attend("mtp.1.attn", main, 20, x)
    for at in range(K):
        changed = x.clone()
        changed[at] = torch.randn(D, generator=g, dtype=F64)
        assert (draft.attend("mtp.1.attn", main, 20, changed) - base).abs().amax(1).min() > 1e-9


def test_positions_are_relative_without_roundings(checkpoint, run_seed):
    draft = ReferenceDraft(ReferenceModel(checkpoint, activation_quant=False, kv_quant=False))
    g = torch.Generator().manual_seed(run_seed)
    main, x = (torch.randn(n, D, generator=g, dtype=F64) for n in (W, K))
    near, far = (draft.attend("mtp.0.attn", main, first, x) for first in (0, 1000))
    assert torch.allclose(near, far, rtol=0, atol=1e-9)
    rounded = ReferenceDraft(ReferenceModel(checkpoint)).attend("mtp.0.attn", main, 0, x)
    assert (rounded - near).abs().max() > 1e-6


def test_features_are_the_targets_entries(draft, draw, monkeypatch):
    ids = draw(20)
    notes = draft.reference.trace(ids)
    six, seven, four = (notes[i]["stream_in"].sum(1) / 4 for i in (6, 7, 4))
    assert draft.c.dspark_target_layer_ids == [6, 7]
    assert torch.allclose(draft.features(ids), torch.cat([six, seven], 1))
    assert torch.allclose(six, notes[5]["stream_out"].mean(1))
    monkeypatch.setattr(draft.reference, "targets", [7, 4])  # 4 has an Engram
    assert torch.allclose(draft.features(ids), torch.cat([seven, four], 1))


def test_features_may_be_the_last_rows(draft, draw):
    ids, (anchor,) = draw(20), draw(1)
    whole, features = draft.propose(ids, anchor), draft.features(ids)
    for rows in (features, features[-W:], features[5:]):
        got = draft.propose(ids, anchor, features=rows)
        assert torch.equal(got.logits, whole.logits) and got.tokens == whole.tokens
    narrow = draft.features(ids, decoder_start=14)
    got = draft.propose(ids, anchor, features=narrow, window_start=14)
    kept = draft.propose(ids, anchor, features=narrow[14:], window_start=14)
    assert torch.equal(got.logits, kept.logits)
    assert (got.base_logits - whole.base_logits).abs().max() > 1e-6


# -- the chain ------------------------------------------------------------------------------


def test_forced_drafts_move_the_chain_alone(draft, draw):
    ids, (anchor,) = draw(15), draw(1)
    own = draft.propose(ids, anchor)
    again = draft.propose(ids, anchor, drafts=own.tokens[: K - 1])
    assert torch.equal(again.logits, own.logits) and again.tokens == own.tokens
    forced = [draft.c.image_token_id, *draw(K - 1)]
    got = draft.propose(ids, anchor, drafts=forced)
    assert torch.equal(got.base_logits, own.base_logits) and torch.equal(got.hidden, own.hidden)
    embed, head = (draft.w.plain(f"mtp.1.markov_head.{n}.weight") for n in ("embed", "head"))
    for i, token in enumerate((anchor, *forced[: K - 1])):
        assert torch.allclose(got.logits[i] - got.base_logits[i], head @ embed[token])
        assert got.tokens[i] == int(got.logits[i].argmax())
    assert got.confidence[0] == own.confidence[0]


def test_the_lowest_id_wins_a_tie(draft):
    hidden, base = torch.ones(2, D, dtype=F64), torch.zeros(2, draft.c.vocab_size, dtype=F64)
    embed, head = (draft.w.plain(f"mtp.1.markov_head.{n}.weight") for n in ("embed", "head"))
    base[0] = -(head @ embed[9])
    base[0, :40] -= 1
    got = draft.chain(hidden, base, 9, None)
    assert got.tokens[0] == 40 and got.gaps[0] == 0
    assert torch.allclose(got.logits[1], head @ embed[40])


def test_markov_and_confidence_have_weight(draft, draw):
    """The random checkpoint must not make any part of the draft vanish."""
    a, b = (draft.propose(draw(20), t) for t in draw(2))
    assert (a.logits - a.base_logits).std() > 0.01 and a.base_logits.std() > 0.01
    assert 0 < a.confidence.min() and a.confidence.max() < 1
    assert (a.confidence - b.confidence).abs().max() > 1e-4


def test_refusals(draft, draw):
    ids = draw(20)
    features = draft.features(ids)
    for arguments, match in (
        ({"k": K + 1}, "dspark_block_size"),
        ({"k": 0}, "dspark_block_size"),
        ({"drafts": [5]}, "drafts"),
        ({"drafts": [5, 9999]}, "drafts"),
        ({"features": features[-W + 1 :]}, "features"),
    ):
        with pytest.raises(ValueError, match=match):
            draft.propose(ids, 5, **arguments)
    with pytest.raises(ValueError, match="token_ids"):
        draft.propose(ids, draft.c.image_token_id)
