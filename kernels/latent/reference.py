# SPDX-License-Identifier: Apache-2.0
"""Latents in plain torch: norm, RoPE and record into a cache; pairs of tokens through their ring.  (v41-facts 4.3, 4.4)"""

from __future__ import annotations

import torch

from ..formats.records import Record
from ..invariant import row_op
from ..norm import rms_norm
from ..paging import write_rows
from ..rope import rope


def write_record(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, positions: torch.Tensor, freq: torch.Tensor,
    slots: torch.Tensor, cache: torch.Tensor, record: Record, ratio: int = 1, block_size: int | None = None,
) -> torch.Tensor:
    """RMSNorm, then RoPE at each group's first position, then the record of x's rows into `cache`.

    x [T, d]; norm_weight bf16 [d] (None: x is normed already); positions int64 [T]; freq float64 [rope/2] radians a
    position; cache uint8 [blocks, states, width], blocks may lie apart.  slots int64 [T] are the host's token slots,
    block * block_size + offset, -1 where nothing is written; with a ratio of 2 a row is written where its position is
    odd, at state offset // 2.  block_size in tokens; None: states * ratio.
    Returns the rows before RoPE [T, d] in x's dtype.
    """
    latent = x if norm_weight is None else rms_norm(x, norm_weight, eps).to(x.dtype)
    size = block_size or cache.shape[1] * ratio
    complete = (slots >= 0) & ((positions + 1) % ratio == 0)
    states = torch.where(complete, slots // size * cache.shape[1] + slots % size // ratio, -1)
    write_rows(cache, states, record.encode(rope(latent, positions // ratio * ratio, freq)))
    return latent


def pair_latents(
    state: torch.Tensor, positions: torch.Tensor, req: torch.Tensor, first: torch.Tensor, ring: torch.Tensor, block_table: torch.Tensor,
) -> torch.Tensor:
    """The gated mean of each row and the row before it; the newest rows into the ring.

    state [T, 2 d], a projection and a gate in float32 (or float64); positions int64 [T], those of a request one after
    the other; req int64 [T]; first int64 [R+1] row offsets; ring [blocks, states, 2 d] in state's dtype, a block a
    request, block_table[:, 0], by position mod states.  Row by row -> [T, d]: before a request's first row lies what
    the ring holds of the position before.  Where a position is even the mean is of no use, as is that of a padding row,
    which lies outside `first` and writes nothing, whatever its req.
    """
    states, count = ring.shape[1], state.shape[0]
    begin, end = first[req], first[req + 1]
    here = torch.arange(count, device=state.device)
    block = block_table[:, 0].long()[req]
    before = ring[block, (positions - 1) % states]
    before = torch.where((here > begin)[:, None], state.roll(1, 0), before)
    # Older rows of a long chunk would collide in the ring; only the newest are ever read.
    kept = (here >= end - states) & (here < end)
    write_rows(ring, torch.where(kept, block * states + positions % states, -1), state)
    return _gated_mean(before, state)


@row_op(2)
def _gated_mean(before: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """(values, gates) [T, 2 d] of two tokens -> [T, d]."""
    values, gates = torch.stack((before, state)).chunk(2, -1)
    return (values * torch.softmax(gates, 0)).sum(0)
