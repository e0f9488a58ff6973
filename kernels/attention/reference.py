# SPDX-License-Identifier: Apache-2.0
"""The plain form of the attention.  (v41-facts 4.1)"""

from __future__ import annotations

import torch

from ..formats.records import Record
from ..paging import read_rows

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
    out = torch.empty_like(q)
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        kv = torch.cat([read_rows(cache, s[rows], record, acc) for cache, s, record in sources], 1)
        seen = torch.cat([s[rows] >= 0 for _, s, _ in sources], 1)
        score = torch.einsum("thd,tsd->ths", q[rows].to(acc), kv) * scale
        score = score.masked_fill(~seen[:, None], float("-inf"))
        score = torch.cat((score, sink.to(acc)[None, :, None].expand(score.shape[0], -1, 1)), -1)
        p = torch.softmax(score, -1)[..., :-1]
        out[rows] = torch.einsum("ths,tsd->thd", p, kv).to(q.dtype)
    return out
