# SPDX-License-Identifier: Apache-2.0
"""Addressing of the host's paged caches: uint8 (or float) tensors [blocks, states, width]."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats.records import Record


class Paged(NamedTuple):
    """A paged cache as kernels address it: row j of request r lies in block block_table[r, j // states] at j % states.

    cache uint8 [blocks, states, width] (blocks may be padded: strides count); block_table int32 [R, n];
    states: the tokens or rows that a block holds.
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    states: int


def slots_of(block_table: torch.Tensor, req: torch.Tensor, rows: torch.Tensor, states: int) -> torch.Tensor:
    """Slots of logical rows: block_table int32 [R, n], req int64 [T], rows int64 [T, S] (-1: none).

    Row j of a request lies in its block j // states at state j % states; slot = block * states + state.
    """
    block = rows.clamp(min=0) // states
    table = block_table[req].long()
    slot = table.gather(1, block.clamp(max=table.shape[1] - 1)) * states + rows % states
    return torch.where(rows >= 0, slot, -1)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """cache[slot] = value for slots int64 [T] >= 0; values [T, width]; others are dropped.

    A dropped row is sent to slot 0: block 0 is the host's null block, which no request reads.
    """
    states = cache.shape[1]
    slots = slots.clamp(min=0)
    cache[slots // states, slots % states] = values.to(cache.dtype)


def read_rows(cache: torch.Tensor, slots: torch.Tensor, record: Record, dtype: torch.dtype) -> torch.Tensor:
    """Decoded rows: slots int64 [..., S] -> [..., S, dim] in `dtype`; slot -1 gives zeros."""
    states = cache.shape[1]
    at = slots.clamp(min=0)
    raw = cache[at // states, at % states]
    return record.decode(raw, dtype).masked_fill_((slots < 0)[..., None], 0)
