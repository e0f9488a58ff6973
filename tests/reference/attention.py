# SPDX-License-Identifier: Apache-2.0
"""Window and compressed attention, the compressor and the indexer (facts 4).

All rows of a run are present at once: window rows [T, dh], global rows [n, dh], and every
visibility rule is a boolean mask over (query, row).
"""

from dataclasses import dataclass

import torch

from . import formats
from .layers import Ops, top_lowest_first
from .rope import Rope
from .runs import GlobalRows, Span
from .weights import Layer

# Queries are taken this many at a time, which bounds the score matrices and changes nothing else.
_QUERIES_AT_ONCE = 256


@dataclass
class Choice:
    """What an index source publishes.

    ``chosen`` bool [T, n]: rows each query reads. ``scores`` [T, n], -inf where not allowed.
    ``blocks`` bool [T, ceil(n / block)] of the candidate source, else None.
    """

    chosen: torch.Tensor
    scores: torch.Tensor
    blocks: torch.Tensor | None = None

    def rows(self, k: int) -> torch.Tensor:
        """Ascending row numbers [T, k], padded with -1."""
        T, n = self.chosen.shape
        number = torch.arange(n, device=self.chosen.device).expand(T, n)
        number = torch.where(self.chosen, number, n).sort(-1).values[:, :k]
        number = torch.nn.functional.pad(number, (0, k - number.shape[1]), value=n)
        return torch.where(number == n, -1, number)


class Attention:
    """Attention of every layer of one checkpoint."""

    def __init__(self, config, weights, ops: Ops, kv_quant: bool, index_quant: bool, kv_format):
        self.c, self.w, self.ops = config, weights, ops
        self.kv_quant, self.index_quant, self.v4 = kv_quant, index_quant, kv_format == "v4"
        dim, device = config.qk_rope_head_dim, weights.device
        self.plain_rope = Rope(dim, config.rope_theta, None, device)
        self.yarn_rope = Rope(dim, config.compress_rope_theta, config.rope_scaling, device)

    def rope(self, layer: Layer) -> Rope:
        return self.yarn_rope if layer.ratio else self.plain_rope

    # -- cache formats ----------------------------------------------------------------------

    def store_window(self, kv: torch.Tensor) -> torch.Tensor:
        if not self.kv_quant:
            return kv
        v4 = self.v4
        return formats.quant_v4_record(kv, self.c.qk_rope_head_dim) if v4 else formats.quant_fp8(kv)

    def store_global(self, kv: torch.Tensor) -> torch.Tensor:
        if not self.kv_quant:
            return kv
        return self.store_window(kv) if self.v4 else formats.quant_kv_fp4(kv)

    def store_index(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.index_quant:
            return rows
        return formats.quant_index_fp8(rows) if self.v4 else formats.quant_index_fp4(rows)

    # -- compressor -------------------------------------------------------------------------

    def latents(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        """``x`` [T, D] to [T // ratio, dh]: one per complete group of ``ratio`` tokens."""
        p = f"layers.{layer.index}.attn.compressor"
        a = self.ops.project(f"{p}.wkv", x)
        if layer.ratio == 2:
            pairs = len(x) // 2
            g = self.ops.project(f"{p}.wgate", x)
            a, g = (v[: 2 * pairs].unflatten(0, (pairs, 2)) for v in (a, g))
            a = (a * g.softmax(1)).sum(1)
        return self.ops.norm(a, f"{p}.norm")

    def publish(self, x: torch.Tensor, layer: Layer, span: Span) -> GlobalRows:
        """The global rows of a KV source: those of the hit as cached, then one for each later
        group, with RoPE at the first token of the group."""
        replay = span.replay
        latent = self.latents(x[replay.hit - replay.start :], layer)
        pos = replay.hit + torch.arange(len(latent), device=x.device) * layer.ratio
        rope, p = self.rope(layer), f"layers.{layer.index}.attn.indexer"
        key = self.ops.norm(self.ops.project(f"{p}.wk", latent), f"{p}.k_norm")
        kv, key = self.store_global(rope(latent, pos)), self.store_index(rope(key, pos))
        if replay.hit:
            n, old = replay.hit // layer.ratio, replay.cached[layer.index]
            kv, key = torch.cat([old.kv[:n], kv]), torch.cat([old.key[:n], key])
        return GlobalRows(kv, key)

    # -- indexer ----------------------------------------------------------------------------

    def choose(self, x, qr, pos, layer: Layer, key: torch.Tensor, candidate) -> Choice:
        """Rows for each query of an index source.

        ``candidate``: the candidate source's blocks if this layer is restricted to them.
        """
        c, T, n = self.c, len(x), len(key)
        p = f"layers.{layer.index}.attn.indexer"
        q = self.ops.linear(f"{p}.wq_b", qr).view(T, c.index_n_heads, c.index_head_dim)
        q = self.store_index(self.rope(layer)(q, pos))
        weight = self.ops.project(f"{p}.weights_proj", x)
        weight = weight * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        scores = torch.zeros(T, n, dtype=torch.float64, device=x.device)
        for h in range(c.index_n_heads):
            scores = scores + weight[:, h, None] * (q[:, h] @ key.T).relu()
        visible = (pos + 1) // layer.ratio  # n(t): rows 0 .. n(t)-1 are complete
        allowed = torch.arange(n, device=x.device) < visible[:, None]
        if candidate is not None:
            allowed = allowed & candidate.repeat_interleave(c.candidate_block_size, 1)[:, :n]
        scores = scores.masked_fill(~allowed, -torch.inf)
        chosen = _mark_best(scores, c.index_topk)
        if layer.index != c.candidate_source_layer_id:
            return Choice(chosen, scores)
        return Choice(chosen, scores, self.candidate_blocks(scores, visible))

    def candidate_blocks(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Bool [T, blocks]: the blocks kept by their best row, the newest one always."""
        size, (T, n) = self.c.candidate_block_size, scores.shape
        padded = torch.nn.functional.pad(scores, (0, -n % size), value=-torch.inf)
        best = padded.view(T, padded.shape[1] // size, size).amax(-1)
        newest = (visible - 1) // size
        number = torch.arange(best.shape[1], device=scores.device)
        best = torch.where(number == newest[:, None], torch.inf, best)  # newest is -1: none yet
        return _mark_best(best, self.c.candidate_topk_blocks)

    # -- the sublayer -----------------------------------------------------------------------

    def __call__(self, x: torch.Tensor, layer: Layer, span: Span) -> torch.Tensor:
        """``x`` [T, D], the run's rows, to [T, D]. Sources add to ``span`` by their index."""
        p, pos, rope = f"layers.{layer.index}.attn", span.pos, self.rope(layer)
        q, qr = self.queries(x, p, pos, rope)
        kv = self.window_rows(x, p, pos, rope)
        rows, chosen = None, None
        if layer.ratio:
            if layer.kv_source == layer.index:
                span.published[layer.index] = self.publish(x, layer, span)
            rows = span.published[layer.kv_source]
            if layer.index_source == layer.index:
                source = self.c.candidate_source_layer_id
                blocks = span.choices[source].blocks if layer.restricted else None
                span.choices[layer.index] = self.choose(x, qr, pos, layer, rows.key, blocks)
            rows, chosen = rows.kv, span.choices[layer.index_source].chosen
        start = span.window_start(layer.index) - span.replay.start
        o = self.attend(q, kv, rows, chosen, self.w.plain(f"{p}.attn_sink"), start)
        return self.output(o, p, pos, rope)

    def queries(self, x, p: str, pos, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, dh] and the normed low-rank rows [T, q_lora] that they come from."""
        qr = self.ops.norm(self.ops.linear(f"{p}.wq_a", x), f"{p}.q_norm")
        q = self.ops.linear(f"{p}.wq_b", qr).view(len(x), self.c.num_attention_heads, -1)
        return rope(q, pos), qr

    def window_rows(self, x, p: str, pos, rope: Rope) -> torch.Tensor:
        """Window KV [T, dh] of ``x`` [T, D] as the cache holds it."""
        kv = self.ops.norm(self.ops.linear(f"{p}.wkv", x), f"{p}.kv_norm")
        return self.store_window(rope(kv, pos))

    def output(self, o: torch.Tensor, p: str, pos, rope: Rope) -> torch.Tensor:
        """``o`` [T, H, dh] rotated back, through the grouped wo_a and wo_b: [T, D]."""
        grouped = rope(o, pos, True).reshape(len(o), self.c.o_groups, -1)
        wo_a = self.w.matrix(f"{p}.wo_a").view(self.c.o_groups, self.c.o_lora_rank, -1)
        z = torch.einsum("tgi,goi->tgo", grouped, wo_a)
        return self.ops.linear(f"{p}.wo_b", z.flatten(1))

    def attend(self, q, kv, rows, chosen, sink, start: int = 0) -> torch.Tensor:
        """Each query over its window rows, its chosen global rows and the sink.

        ``q`` [T, H, dh], ``kv`` [T, dh], ``rows`` [n, dh] or None, ``chosen`` bool [T, n],
        ``sink`` [H]; window rows before ``start`` are seen by none. Returns [T, H, dh].
        """
        T, out = len(q), []
        for lo in range(0, T, _QUERIES_AT_ONCE):
            hi = min(lo + _QUERIES_AT_ONCE, T)
            first = max(lo - self.c.sliding_window + 1, 0)
            at, key = (torch.arange(a, hi, device=q.device) for a in (lo, first))
            age = at[:, None] - key
            seen = (age >= 0) & (age < self.c.sliding_window) & (key >= start)
            values = kv[first:hi]
            if rows is not None:
                seen = torch.cat([seen, chosen[lo:hi]], 1)
                values = torch.cat([values, rows])
            out.append(self.weigh(q[lo:hi], values, seen, sink))
        return torch.cat(out)

    def weigh(self, q, values, seen, sink) -> torch.Tensor:
        """One softmax over the ``seen`` bool [T, n] of ``values`` [n, dh] and the valueless sink.

        ``q`` [T, H, dh]; returns [T, H, dh].
        """
        score = torch.einsum("thd,rd->thr", q, values) * self.c.head_dim**-0.5
        score = score.masked_fill(~seen[:, None], -torch.inf)
        score = torch.cat([score, sink[:, None].expand(len(q), -1, 1)], -1)
        return torch.einsum("thr,rd->thd", score.softmax(-1)[..., :-1], values)


def _mark_best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Bool mask of the k best of each row, without those that are -inf."""
    best = top_lowest_first(scores, k)
    mark = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
    return mark & (scores > -torch.inf)
