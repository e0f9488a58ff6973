# SPDX-License-Identifier: Apache-2.0
"""Linears of few rows at the speed of memory: out^T = W x^T on the tensor cores, the sum over K cut into splits.

A program takes BM of the weight's rows, BN of x's rows and one split of K, in steps of 128 bytes.  With several splits each program
leaves its sums, and the last of a tile to arrive adds them in the splits' order, so no bit depends on who that was.
The splits depend on the weight's shape only, steps are 128 of K (FP8) or 64 (bf16) in any configuration, and a tensor core
computes each column by itself: a row's bits depend neither on T nor on other rows.  Importing this module imports Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats.rowfp8 import RowFp8
from .row_weight import RowWeight
from ..triton_rounding import INTERPRETED, to_bf16

# Programs of 64 weight rows in flight: two an SM of an H200, each with four steps (32 KiB) under way, is twice what memory needs.
PROGRAMS = 264
# Rows of x in one launch, which bounds the splits' sums.
MOST_ROWS = 1024
# A split is at least this many steps of K; the last program of a tile adds at most so many sums.
LEAST_STEPS = 2
MOST_SPLITS = 16


class Config(NamedTuple):
    """BM weight rows, BN rows of x, warps (4 for each 64 of BM, so that every warpgroup has its own), pipeline stages, registers a thread at most."""

    bm: int
    bn: int
    warps: int
    stages: int
    registers: int | None = None


LEAST_BM, LEAST_BN = 64, 16
# By rows of x at most. x comes from L2 once a program: wide tiles of x want tall ones of the weight.
# Registers leave room for two programs an SM but at 128 x 128, which has one with all of shared memory.
CONFIGS = {16: Config(64, 16, 4, 5), 32: Config(64, 32, 4, 5), 64: Config(128, 64, 8, 4, 128), 128: Config(128, 128, 8, 6)}
INVARIANT = CONFIGS[64]


def config_for(rows: int, configs: dict[int, Config] = CONFIGS) -> Config:
    """The configuration for T rows, or the one for most rows."""
    return next((config for most, config in configs.items() if rows <= most), configs[max(configs)])


def splits_for(outputs: int, steps: int) -> int:
    """Into how many parts K is cut: as few as give `PROGRAMS` programs of 64 outputs, then evenly many steps each."""
    tiles = triton.cdiv(outputs, 64)
    wanted = min(triton.cdiv(PROGRAMS, tiles), max(steps // LEAST_STEPS, 1), MOST_SPLITS)
    # As many steps as the longest split has, in as few splits as hold them.
    return triton.cdiv(steps, triton.cdiv(steps, wanted))


def row_product(x: RowFp8, weight: RowWeight, out_dtype: torch.dtype, config: Config | None = None) -> torch.Tensor:
    """`reference.row_linear` for any T: bf16 or float32 [T, o]; `config` instead of the table's."""
    return _product(x.q, x.scale, weight.q, weight.scale, out_dtype, config)


def wide_product(x: torch.Tensor, weight: torch.Tensor, config: Config | None = None) -> torch.Tensor:
    """`reference.wide_linear` of bf16 for any T: float32 [T, o]; `config` instead of the table's."""
    return _product(x, None, weight, None, torch.float32, config)


def _product(x, x_scale, weight, weight_scale, out_dtype: torch.dtype, config: Config | None) -> torch.Tensor:
    rows, (outputs, depth) = len(x), weight.shape
    if x.shape[1] != depth:
        raise ValueError(f"x has {x.shape[1]} columns, the weight {depth}: they must agree")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("x needs contiguous rows and the weight must be contiguous: call .contiguous() once, after loading")
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    config = config or config_for(rows)
    step = 128 // weight.element_size()
    splits = splits_for(outputs, triton.cdiv(depth, step))
    for first in range(0, rows, MOST_ROWS):
        part, scale = x[first : first + MOST_ROWS], None if x_scale is None else x_scale[first : first + MOST_ROWS]
        tiles = (triton.cdiv(len(part), config.bn), triton.cdiv(outputs, config.bm))
        count = tiles[0] * tiles[1]
        sums = torch.empty(splits * count * config.bm * config.bn if splits > 1 else 0, dtype=torch.float32, device=x.device)
        _skinny[(*tiles, splits)](
            part, part.stride(0) if rows > 1 else depth, scale, weight, weight_scale, out[first:], sums, arrivals_of(weight) if splits > 1 else sums,
            len(part), outputs, depth, BM=config.bm, BN=config.bn, BK=step, SPLITS=splits, EVEN=depth % step == 0,
            num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
        )
    return out


_counters: dict[tuple, torch.Tensor] = {}


def arrivals_of(weight: torch.Tensor) -> torch.Tensor:
    """int32 zeros for all tiles of a launch, which leaves them zero again; of this weight alone, so one weight may not run on two streams at once.

    Made in the first call and kept for good, as graphs hold its address; a call that finds none while a graph is captured takes its own,
    zeroed in the graph.
    """
    key = (weight.device, weight.data_ptr(), weight.shape[0])
    held = _counters.get(key)
    if held is None:
        held = torch.zeros(triton.cdiv(weight.shape[0], LEAST_BM) * triton.cdiv(MOST_ROWS, LEAST_BN), dtype=torch.int32, device=weight.device)
        if not (held.is_cuda and torch.cuda.is_current_stream_capturing()):
            _counters[key] = held
    return held


@triton.jit
def finish(y, x_scale, w_scale, out, m, n, rows, outputs):
    """Sums [BM, BN] times their scales, rounded, to out [rows, outputs]."""
    if x_scale is not None:
        y = y * tl.load(w_scale + m, mask=m < outputs, other=0.0)[:, None] * tl.load(x_scale + n, mask=n < rows, other=0.0)[None, :]
    y = to_bf16(y) if out.dtype.element_ty == tl.bfloat16 else y
    tl.store(out + n.to(tl.int64)[None, :] * outputs + m[:, None], y, mask=(m < outputs)[:, None] & (n < rows)[None, :])


@triton.jit
def leave(acc, sums, arrivals, tile, tiles, split, SPLITS: tl.constexpr):
    """A split's sums [BM, BN] to `sums` [SPLITS, tiles, BM, BN]; whether all splits of the tile have now left theirs."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    place = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(sums + (split * tiles + tile).to(tl.int64) * (BM * BN) + place, acc)
    # All threads' sums before the one thread's arrival, which releases them; the last one's acquires all of them.
    tl.debug_barrier()
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1


@triton.jit
def gather(sums, tile, tiles, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of a tile's splits, in their order."""
    place = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    y = tl.zeros([BM, BN], tl.float32)
    for s in tl.static_range(SPLITS):
        y += tl.load(sums + (s * tiles + tile).to(tl.int64) * (BM * BN) + place, cache_modifier=".cg")
    return y


@triton.jit(do_not_specialize=["rows"])
def _skinny(
    x, x_stride, x_scale, w, w_scale, out, sums, arrivals, rows, outputs, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
):
    """Grid (x tiles, weight tiles, SPLITS); `sums` [SPLITS, tiles, BM, BN], `arrivals` [tiles] zeros."""
    tile_n, tile_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    m, n = tile_m * BM + i, tile_n * BN + j
    steps = tl.cdiv(depth, BK)
    first, last = split * steps // SPLITS, (split + 1) * steps // SPLITS

    # Rows past the weight's last are its last again; they are not stored.
    w_here = w + tl.minimum(m, outputs - 1).to(tl.int64)[:, None] * depth + (first * BK + k)[None, :]
    x_here = x + n.to(tl.int64)[None, :] * x_stride + (first * BK + k)[:, None]
    real = (n < rows)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(first, last):
        if EVEN:
            a = tl.load(w_here)
            b = tl.load(x_here, mask=real, other=0.0)
        else:
            inside = step * BK + k < depth
            a = tl.load(w_here, mask=inside[None, :], other=0.0)
            b = tl.load(x_here, mask=real & inside[:, None], other=0.0)
        if INTERPRETED and a.dtype == tl.bfloat16:
            a, b = a.to(tl.float32), b.to(tl.float32)  # the interpreter multiplies bf16 as integers
        # FP8's tensor cores keep few bits of a sum: it goes to float32 after each step.
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=BK)
        w_here += BK
        x_here += BK

    if SPLITS == 1:
        finish(acc, x_scale, w_scale, out, m, n, rows, outputs)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tile = tile_m * tl.num_programs(0) + tile_n
        if leave(acc, sums, arrivals, tile, tiles, split, SPLITS):
            finish(gather(sums, tile, tiles, BM, BN, SPLITS), x_scale, w_scale, out, m, n, rows, outputs)
            tl.store(arrivals + tile, 0)
