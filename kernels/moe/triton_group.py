# SPDX-License-Identifier: Apache-2.0
"""Before the experts' products: pairs sorted by expert and cut into tiles; rows as FP8 in the products' column order.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats.rowfp8 import RowFp8
from ..triton_rounding import power_of_two, to_e4m3


class Groups(NamedTuple):
    """Tiles of `block_n` pairs (row, choice), each of one expert; all int32, on the device.

    `expert` [tiles]: the local expert, -1 behind the last tile in use.  `pair` [tiles * block_n]: row * k + choice,
    rising within an expert, -1 where a tile is not full; nothing is said of tiles not in use.
    `tiles` is a bound known to the host: min(pairs, E) + pairs // block_n.
    """

    expert: torch.Tensor
    pair: torch.Tensor
    block_n: int


def prepare(
    x: torch.Tensor, ids: torch.Tensor, first_expert: int, experts: int, block_n: int, fp8: RowFp8 | None = None,
) -> tuple[Groups, RowFp8]:
    """One launch: `ids` [T, k] -> Groups, and `x` [T, D] (or its `fp8`) -> FP8 rows in the products' column order.

    That order: in each 32 columns the 16 even ones, then the 16 odd ones, as the nibbles of a packed byte come apart.
    A program for each expert counts all pairs, so an expert's tiles begin at the same place whatever runs first.
    """
    rows, k = ids.shape
    pairs, width = rows * k, x.shape[1]
    tiles = min(pairs, experts) + pairs // block_n
    expert = torch.empty(tiles, dtype=torch.int32, device=x.device)
    pair = torch.empty(tiles * block_n, dtype=torch.int32, device=x.device)
    q = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = fp8.scale if fp8 is not None else torch.empty(rows, dtype=torch.float32, device=x.device)
    source = x if fp8 is None else fp8.q
    _prepare[(experts + rows,)](
        ids, ids.stride(0), ids.stride(1), expert, pair, pairs, k, tiles, first_expert, experts,
        source, source.stride(0), q, scale, width,
        BLOCK_N=block_n, CHUNK=512 if pairs <= 2048 else 4096, BINS=max(128, triton.next_power_of_2(experts + 1)),
        COLUMNS=min(2048, triton.next_power_of_2(width)), QUANTIZE=fp8 is None, num_warps=4,
    )
    return Groups(expert, pair, block_n), RowFp8(q, scale)


def quantize_rows(h: torch.Tensor, groups: Groups) -> RowFp8:
    """bf16 [slots, F] -> FP8 rows in the products' column order; slots without a pair are left as they are."""
    slots, width = h.shape
    q = torch.empty(slots, width, dtype=torch.float8_e4m3fn, device=h.device)
    scale = torch.empty(slots, dtype=torch.float32, device=h.device)
    _quantize[(slots,)](h, q, scale, groups.expert, groups.pair, width, BLOCK_N=groups.block_n, COLUMNS=min(4096, triton.next_power_of_2(width)), num_warps=4)
    return RowFp8(q, scale)


@triton.jit
def ceil_exponent(a):
    """ceil(log2(a / 448)) of normal a > 0, exact: 448 is 1.75 * 2^8."""
    bits = a.to(tl.int32, bitcast=True)
    return (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def _local(ids, row_stride, choice_stride, p, pairs, k, first_expert, experts):
    """Local experts of pairs `p`; `experts` for those that are elsewhere or behind the last pair."""
    real = p < pairs
    at = (p // k).to(tl.int64) * row_stride + (p % k) * choice_stride
    e = tl.load(ids + at, mask=real, other=first_expert - 1) - first_expert
    return tl.where((e >= 0) & (e < experts), e, experts).to(tl.int32)


@triton.jit
def _group(ids, row_stride, choice_stride, expert, pair, pairs, k, tiles, first_expert, experts, mine, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr):
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        counts += tl.histogram(_local(ids, row_stride, choice_stride, start + lane, pairs, k, first_expert, experts), BINS)
    needed = tl.where(bins < experts, (counts + (BLOCK_N - 1)) // BLOCK_N, 0)
    first = tl.sum(tl.where(bins < mine, needed, 0), 0)
    used = tl.sum(tl.where(bins == mine, needed, 0), 0)
    count = tl.sum(tl.where(bins == mine, counts, 0), 0)

    for start in range(0, used, CHUNK):
        tl.store(expert + first + start + lane, lane * 0 + mine, mask=start + lane < used)
    if mine == experts - 1:
        for start in range(first + used, tiles, CHUNK):
            tl.store(expert + start + lane, lane * 0 - 1, mask=start + lane < tiles)
    pad = tl.arange(0, BLOCK_N)
    begin = first.to(tl.int64) * BLOCK_N
    tl.store(pair + begin + count + pad, pad * 0 - 1, mask=count + pad < used * BLOCK_N)
    if count > 0:
        done = begin * 0
        for start in range(0, pairs, CHUNK):
            p = start + lane
            here = _local(ids, row_stride, choice_stride, p, pairs, k, first_expert, experts) == mine
            place = tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(pair + begin + done + place, p, mask=here)
            done += tl.sum(here.to(tl.int32), 0)


@triton.jit
def _columns(x, width, start, COLUMNS: tl.constexpr):
    column = start + tl.arange(0, COLUMNS)
    return tl.load(x + column, mask=column < width, other=0.0)


@triton.jit
def _apart(q, start, x, width, COLUMNS: tl.constexpr):
    """Store `x` [COLUMNS] with the even ones of each 32 first."""
    column = start + tl.arange(0, COLUMNS)
    x = tl.reshape(tl.permute(tl.reshape(x, (COLUMNS // 32, 16, 2)), (0, 2, 1)), (COLUMNS,))
    tl.store(q + column, x, mask=column < width)


@triton.jit
def _row(x, q, scale, width, COLUMNS: tl.constexpr, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        most = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, width, COLUMNS):
            most = tl.maximum(most, tl.abs(_columns(x, width, start, COLUMNS).to(tl.float32)))
        exponent = ceil_exponent(tl.maximum(tl.max(most, 0), 1e-4))
        tl.store(scale, power_of_two(exponent))
        for start in range(0, width, COLUMNS):
            value = _columns(x, width, start, COLUMNS).to(tl.float32) * power_of_two(-exponent)
            _apart(q, start, to_e4m3(value), width, COLUMNS)
    else:
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            _apart(q, start, tl.load(x + column, mask=column < width), width, COLUMNS)


@triton.jit(do_not_specialize=["pairs", "tiles", "first_expert", "experts"])
def _prepare(
    ids, row_stride, choice_stride, expert, pair, pairs, k, tiles, first_expert, experts, x, x_stride, q, scale, width,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, COLUMNS: tl.constexpr, QUANTIZE: tl.constexpr,
):
    """The first `experts` programs take an expert each, the others a row each."""
    program = tl.program_id(0)
    if program < experts:
        _group(ids, row_stride, choice_stride, expert, pair, pairs, k, tiles, first_expert, experts, program, BLOCK_N, CHUNK, BINS)
    else:
        row = (program - experts).to(tl.int64)
        _row(x + row * x_stride, q + row * width, scale + row, width, COLUMNS, QUANTIZE)


@triton.jit
def _quantize(h, q, scale, expert, pair, width, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(expert + slot // BLOCK_N) >= 0:
        if tl.load(pair + slot) >= 0:
            _row(h + slot * width, q + slot * width, scale + slot, width, COLUMNS, True)
