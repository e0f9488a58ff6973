# SPDX-License-Identifier: Apache-2.0
"""The plain form of the attention.  (v41-facts 4.1)"""

from __future__ import annotations

import torch

from ..formats.records import Record
from ..invariant import over_rows
from ..paging import Paged, read_rows, slots_of
from ..rope import rope

# Rows of gathered latents a chunk may hold: bounds the workspace at about 256 MiB of float32.
_CHUNK_VALUES = 1 << 26


def sparse_attention(
    q: torch.Tensor, sink: torch.Tensor, scale: float,
    window: torch.Tensor, window_slots: torch.Tensor, window_record: Record,
    compressed: torch.Tensor | None, compressed_slots: torch.Tensor | None, compressed_record: Record | None,
) -> torch.Tensor:
    """One softmax over window rows, selected compressed rows and the sink (which has no value).

    q [T, H, d]; sink [H] float32; window, compressed: paged caches uint8 [blocks, states, width];
    *_slots int64 [T, S], -1 where there is no row.  Returns [T, H, d] in q's dtype.
    """
    acc = torch.promote_types(q.dtype, torch.float32)
    sources = [(window, window_slots, window_record)]
    if compressed is not None:
        sources.append((compressed, compressed_slots, compressed_record))
    width = sum(slots.shape[1] for _, slots, _ in sources)
    step = max(1, _CHUNK_VALUES // (width * q.shape[2]))

    def attend(q: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
        kv = torch.cat([read_rows(cache, s, record, acc) for (cache, _, record), s in zip(sources, slots, strict=True)], 1)
        seen = torch.cat(slots, 1) >= 0
        score = torch.einsum("thd,tsd->ths", q.to(acc), kv) * scale
        score = score.masked_fill(~seen[:, None], float("-inf"))
        score = torch.cat((score, sink.to(acc)[None, :, None].expand(score.shape[0], -1, 1)), -1)
        p = torch.softmax(score, -1)[..., :-1]
        return torch.einsum("ths,tsd->thd", p, kv).to(q.dtype)

    return over_rows(attend, q, *(slots for _, slots, _ in sources), most=step)


def attend(
    q: torch.Tensor, positions: torch.Tensor, freq: torch.Tensor, sink: torch.Tensor, scale: float,
    window: Paged, low: torch.Tensor, high: torch.Tensor, count: int, window_record: Record,
    compressed: Paged | None, chosen: torch.Tensor | None, compressed_record: Record | None, req: torch.Tensor,
) -> torch.Tensor:
    """RoPE of q, `sparse_attention` over the rows' own pages, inverse RoPE of what comes out: [T, H, d] in q's dtype.

    q [T, H, d] before RoPE; positions, low, high, req int64 [T]; freq float64 [rope/2] radians a position; sink float32 [H].
    Row t sees window positions max(low[t], high[t] - count + 1, 0) .. high[t] of request req[t], and the compressed rows
    chosen[t] (int [T, k], -1: none). A row that sees nothing is zero, whatever req[t] is.
    """
    req = req.clamp(0, window.block_table.shape[0] - 1)
    seen = high[:, None] - torch.arange(count - 1, -1, -1, device=q.device)
    seen = torch.where(seen >= low.clamp(min=0)[:, None], seen, -1)
    slots = slots_of(window.block_table, req, seen, window.states)
    cache = chosen_slots = None
    if compressed is not None:
        cache, chosen_slots = compressed.cache, slots_of(compressed.block_table, req, chosen.long(), compressed.states)
    o = sparse_attention(rope(q, positions, freq), sink, scale, window.cache, slots, window_record, cache, chosen_slots, compressed_record)
    return rope(o, positions, freq, inverse=True)
