# SPDX-License-Identifier: Apache-2.0
"""`pair_latents` in one launch, a program a row.  Importing this module imports Triton.

Only a request's first row reads the ring, and only one entry of it, that of the position before.  The row that would
write this entry leaves it to the first row's program, which reads it before.  So no program reads what another writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference


def pair_latents(
    state: torch.Tensor, positions: torch.Tensor, req: torch.Tensor, first: torch.Tensor, ring: torch.Tensor, block_table: torch.Tensor,
) -> torch.Tensor:
    """`reference.pair_latents`, which also runs here for float64; a row's bits are its own.

    A row outside `first` (padding) has a mean of no use and writes nothing, whatever its `req`.
    """
    if state.dtype != torch.float32 or ring.dtype != torch.float32 or ring.stride(2) != 1:
        return reference.pair_latents(state, positions, req, first, ring, block_table)
    rows, dim = state.shape[0], state.shape[1] // 2
    out = torch.empty(rows, dim, dtype=torch.float32, device=state.device)
    if rows:
        _pairs[(rows,)](
            state.contiguous(), positions.contiguous(), req.contiguous(), first.contiguous(), first.shape[0] - 1, ring, ring.stride(0), ring.stride(1), ring.shape[1],
            block_table, block_table.stride(0), out, D=dim, BLOCK=triton.next_power_of_2(dim), num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["requests", "states", "table_stride"], do_not_specialize_on_alignment=["positions", "req", "first", "block_table"])
def _pairs(
    state, positions, req, first, requests, ring, block_stride, state_stride, states, block_table, table_stride, out,
    D: tl.constexpr, BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    r = tl.load(req + t).to(tl.int64)
    known = (r >= 0) & (r < requests)
    r = tl.where(known, r, 0)
    begin, end = tl.load(first + r), tl.load(first + r + 1)
    known = known & (t >= begin) & (t < end)
    opens = known & (t == begin)
    position = tl.load(positions + t)
    held = ring + tl.load(block_table + r * table_stride).to(tl.int64) * block_stride
    # The entry that the request's first row reads, and its newest writer: the positions of a request are consecutive.
    entry = (position - (t - begin) + states - 1) % states
    writer = begin + (end - begin) // states * states - 1

    i = tl.arange(0, BLOCK)
    mask = i < D
    own = state + t * (2 * D) + i
    before = tl.where(opens, held + entry * state_stride, state + tl.maximum(t - 1, 0) * (2 * D)) + i
    value, gate = tl.load(own, mask=mask, other=0.0), tl.load(own + D, mask=mask, other=0.0)
    value_before, gate_before = tl.load(before, mask=mask, other=0.0), tl.load(before + D, mask=mask, other=0.0)
    most = tl.maximum(gate, gate_before)
    a, b = tl.exp(gate_before - most), tl.exp(gate - most)
    tl.store(out + t * D + i, value_before * (a / (a + b)) + value * (b / (a + b)), mask=mask)

    mine = position % states
    if known & (t >= end - states) & (mine != entry):
        to = held + mine * state_stride + i
        tl.store(to, value, mask=mask)
        tl.store(to + D, gate, mask=mask)
    if opens & (writer >= begin):
        newest = state + writer * (2 * D) + i
        value, gate = tl.load(newest, mask=mask), tl.load(newest + D, mask=mask)
        tl.debug_barrier()
        to = held + entry * state_stride + i
        tl.store(to, value, mask=mask)
        tl.store(to + D, gate, mask=mask)
