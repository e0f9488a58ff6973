# SPDX-License-Identifier: Apache-2.0
"""`attend` in one launch (two where few rows are split over many programs).  Importing this module imports Triton.

A program takes a row and up to 64 heads. Tiles of 64 records are gathered by address, decoded to one tile of bf16 that is
both K and V, and go through an online softmax whose first element is the sink.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import invariant
from ..formats.records import Fp8RopeRecord, GlobalRecord, Record, WindowRecord
from ..paging import Paged
from . import reference
from .triton_pages import FP8_ROPE, GLOBAL, WINDOW, block_of, chosen_rows, decode, fetch, nothing, places
from ..triton_rounding import INTERPRETED, to_bf16
from .triton_records import BIAS
from .triton_rope import query, turned_back, turns

_KINDS = {WindowRecord: WINDOW.value, GlobalRecord: GLOBAL.value, Fp8RopeRecord: FP8_ROPE.value}
_LOWEST = tl.constexpr(-1e30)  # a maximum that any score exceeds and that is finite


class Config(NamedTuple):
    """splits: programs a row (0: by the number of rows); tile: records a step (0: by their kind); heads: a program's, beyond 16."""

    splits: int = 0
    tile: int = 0
    heads: int = 64
    warps: int = 8
    stages: int = 2


def attend(
    q: torch.Tensor, positions: torch.Tensor, freq: torch.Tensor, sink: torch.Tensor, scale: float,
    window: Paged, low: torch.Tensor, high: torch.Tensor, count: int, window_record: Record,
    compressed: Paged | None, chosen: torch.Tensor | None, compressed_record: Record | None, req: torch.Tensor,
    config: Config | None = None,
) -> torch.Tensor:
    """`reference.attend` for bf16 q; other types and shapes that are no power of two go to the reference.

    sink, positions, low, high, req and freq are on q's device; cache rows and block tables have adjacent columns.
    A row's bits depend on that row, its pages and the number of splits. Splits follow from the number of rows alone, and are
    one while `invariant` is switched on: then a row's bits are its own.
    """
    records = (window_record,) if compressed is None else (window_record, compressed_record)
    if not _takes(q, freq, records):
        return reference.attend(
            q, positions, freq, sink, scale, window, low, high, count, window_record, compressed, chosen, compressed_record, req,
        )
    rows, heads, dim = q.shape
    o = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    if not rows:
        return o
    config = config or Config()
    many = 16 if heads <= 16 else config.heads  # Hopper's own products take 64 rows; the older ones 16
    # A tile of V4's records takes more registers than there are.
    tile = config.tile or (32 if any(type(r) is Fp8RopeRecord for r in records) else 64)
    groups = triton.cdiv(heads, many)
    width = 0 if compressed is None else chosen.shape[1]
    window_tiles, tiles = triton.cdiv(count, tile), triton.cdiv(count, tile) + triton.cdiv(width, tile)
    splits = config.splits or (1 if invariant.enabled() else splits_of(rows * groups, tiles, _processors(q.device)))
    positions, low, high, req, sink = (x.contiguous() for x in (positions, low, high, req, sink))
    q, other = _pairs(_inner(q)), window if compressed is None else compressed
    chosen = positions if compressed is None else _inner(chosen)
    part = peak = total = None
    if splits > 1:
        part = torch.empty(splits, rows, heads, dim, dtype=torch.float32, device=q.device)
        peak, total = torch.empty(2, splits, rows, heads, dtype=torch.float32, device=q.device)
    _attend[(rows, groups, splits)](
        q, q.stride(0), q.stride(1), positions, freq, sink, float(scale) * math.log2(math.e) * BIAS.value, req,
        *_paged(window), low, high, count, *_paged(other), chosen, chosen.stride(0), width,
        o, part, peak, total, rows, heads, window_tiles, triton.cdiv(tiles, splits), 1,
        W_STATES=window.states, C_STATES=other.states, W_ALIGN=_alignment(window), C_ALIGN=_alignment(other),
        W_KIND=_KINDS[type(window_record)], C_KIND=-1 if compressed is None else _KINDS[type(compressed_record)],
        D=dim, ROPE=2 * freq.shape[0], HEADS=many, TILE=tile, WIDTH=triton.next_power_of_2(max(width, 1)), SPLIT=splits > 1,
        num_warps=config.warps, num_stages=config.stages,
    )
    if splits > 1:
        block = min(8, many)
        _combine[(rows, triton.cdiv(heads, block))](
            part, peak, total, positions, freq, o, rows, heads, D=dim, ROPE=2 * freq.shape[0], HEADS=block, SPLITS=splits, num_warps=4,
        )
    return o


def splits_of(programs: int, tiles: int, processors: int) -> int:
    """Programs a row. In tiles' time: a program's own start and end are 2, the second launch with its traffic 2."""
    def cost(splits: int) -> float:
        return triton.cdiv(programs * splits, processors) * (triton.cdiv(tiles, splits) + 2) + 2 * (splits > 1)

    return min((s for s in range(1, min(tiles, 8) + 1)), key=cost)


def _takes(q: torch.Tensor, freq: torch.Tensor, records: tuple[Record, ...]) -> bool:
    dim, turned = q.shape[2], 2 * freq.shape[0]
    powers = dim & (dim - 1) == 0 and turned & (turned - 1) == 0
    kinds = all(type(r) in _KINDS and (type(r) is not Fp8RopeRecord or r.rope == turned) for r in records)
    return q.dtype == torch.bfloat16 and powers and 32 <= dim <= 512 and 2 <= turned < dim and kinds


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pairs(q: torch.Tensor) -> torch.Tensor:
    """q so that two values of a row are one aligned word."""
    return q.clone(memory_format=torch.contiguous_format) if q.stride(0) % 2 or q.stride(1) % 2 or q.data_ptr() % 4 else q


def _paged(p: Paged) -> tuple:
    return p.cache, p.cache.stride(0), p.cache.stride(1), p.block_table, p.block_table.stride(0), *p.block_table.shape


def _alignment(p: Paged) -> int:
    """The power of two, at most 16, that every record's address is a multiple of."""
    return math.gcd(16, p.cache.data_ptr(), p.cache.stride(0), p.cache.stride(1))


@triton.jit
def _dot(a, b, acc):
    """acc + a b. The interpreter multiplies the bits of bf16 and not its values."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _softmax(score, scale, peak, total):
    """Online softmax over a tile's scores [H, N]: peak in log2, total [H, 8] (to be summed) relative to it -> both, fade, bf16 p."""
    new = tl.maximum(peak, tl.max(score, 1) * scale)
    fade = tl.exp2(peak - new)
    p = tl.exp2(score * scale - new[:, None])
    # Two warp groups hold half of the columns each, and four threads a row: sums stay in a thread until the end.
    apart = tl.reshape(p, [p.shape[0], 2, p.shape[1] // 16, 4, 2])
    total = total * fade[:, None] + tl.reshape(tl.sum(tl.sum(apart, 4), 2), [p.shape[0], 8])
    return new, total, fade, to_bf16(p)


@triton.jit
def _apply(p, kv, acc, x, scale, turned, once, KIND: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """acc + p kv, and, while the tensor cores are at it, the next tile decoded into registers.

    Two loops of one turn each: what the outer one carries (p) goes to shared memory, and what the inner one computes besides
    its product (the next tile, which must look as if it changed) lies between the product's start and the wait for it.
    """
    tile = tl.zeros([N, D], tl.bfloat16)
    for _ in tl.range(once, disable_licm=True):
        for _ in tl.range(once, disable_licm=True):
            acc = _dot(p, kv, acc)
            tile = decode(x, scale, turned, KIND, N, D, ROPE)
            x, scale, turned = nothing(KIND, N, D, ROPE)
        p = tl.zeros([p.shape[0], N], tl.bfloat16)
    tl.debug_barrier()  # kv and p are read to their end by all warps, not only asked for
    return acc, tile


@triton.jit(do_not_specialize=["count", "width", "rows", "heads", "window_tiles", "share", "once", "w_requests", "w_blocks", "c_requests", "c_blocks"])
def _attend(
    q, q_row, q_head, positions, freq, sink, scale, req,
    window, w_stride, w_row, w_table, w_table_row, w_requests, w_blocks, low, high, count,
    compressed, c_stride, c_row, c_table, c_table_row, c_requests, c_blocks, chosen, chosen_row, width,
    o, part, peaks, totals, rows, heads, window_tiles, share, once,
    W_STATES: tl.constexpr, C_STATES: tl.constexpr, W_ALIGN: tl.constexpr, C_ALIGN: tl.constexpr,
    W_KIND: tl.constexpr, C_KIND: tl.constexpr,
    D: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):
    """Split s of a row takes tiles s * share .. of the row's window_tiles and then its compressed ones."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    column, step = tl.arange(0, D), tl.arange(0, TILE)

    # All loads of a chain's first links come first. What is fetched ahead stays among the rows of this split.
    request = tl.maximum(tl.load(req + row), 0)
    position, lowest, last = tl.load(positions + row), tl.load(low + row), tl.load(high + row)
    begin, end = split * share, (split + 1) * share
    if C_KIND >= 0:
        mine = chosen + row * chosen_row
        listed = tl.load(mine + tl.arange(0, WIDTH), mask=tl.arange(0, WIDTH) < width, other=-1).to(tl.int32)

    first = tl.maximum(tl.maximum(lowest, last - count + 1), 0)
    held = tl.maximum(last - first + 1, 0).to(tl.int32)
    first = first.to(tl.int32)
    w_mine = w_table + tl.minimum(request, w_requests - 1) * w_table_row
    stop = tl.minimum(tl.minimum(end, window_tiles), tl.cdiv(held, TILE))
    bound = tl.minimum(held, stop * TILE) - 1
    ready = begin + 0 * step < stop
    at = first + tl.minimum(begin * TILE + step, bound)
    block = block_of(w_mine, at, w_blocks - 1, ready, W_STATES)
    wx, ws, wr = fetch(window, places(block, at, w_stride, w_row, W_STATES, W_ALIGN), ready, W_KIND, D, ROPE, W_ALIGN)
    at = first + tl.minimum(begin * TILE + TILE + step, bound)
    block = block_of(w_mine, at, w_blocks - 1, ready, W_STATES)

    cos, sin = turns(position, freq, ROPE)
    asked = query(q, row * q_row + head.to(tl.int64) * q_head, real, cos, sin, HEADS, D, ROPE)

    if C_KIND >= 0:
        c_mine = c_table + tl.minimum(request, c_requests - 1) * c_table_row
        some = tl.max(listed, 0)
        c_held = tl.max(tl.where(listed >= 0, tl.arange(0, WIDTH) + 1, 0), 0)
        hole = tl.min(tl.where(listed >= 0, WIDTH, tl.arange(0, WIDTH)), 0)
        c_begin, c_stop = tl.maximum(begin - window_tiles, 0), tl.minimum(end - window_tiles, tl.cdiv(c_held, TILE))
        c_bound = tl.minimum(c_held, c_stop * TILE) - 1
        c_ready = c_begin + 0 * step < c_stop
        c_at = chosen_rows(mine, c_begin * TILE + step, c_bound, some, c_ready)
        c_block = block_of(c_mine, c_at, c_blocks - 1, c_ready, C_STATES)

    for _ in range(once):  # 1, which the compiler does not know: what a loop carries, the tensor cores take from shared memory
        peak = tl.maximum(tl.load(sink + head, mask=real, other=0.0) * 1.4426950408889634, _LOWEST)
        total = tl.zeros([HEADS, 8], tl.float32)
        acc = tl.zeros([HEADS, D], tl.float32)
        kv = decode(wx, ws, wr, W_KIND, TILE, D, ROPE)
        for i in tl.range(begin, stop, num_stages=1, disable_licm=True):
            wx, ws, wr = fetch(window, places(block, at, w_stride, w_row, W_STATES, W_ALIGN), None, W_KIND, D, ROPE, W_ALIGN)
            at = first + tl.minimum(i * TILE + 2 * TILE + step, bound)
            block = block_of(w_mine, at, w_blocks - 1, None, W_STATES)
            score = _dot(asked, tl.trans(kv), tl.zeros([HEADS, TILE], tl.float32))
            if i * TILE + TILE > held:
                score = tl.where((i * TILE + step < held)[None, :], score, float("-inf"))
            peak, total, fade, p = _softmax(score, scale, peak, total)
            acc, kv = _apply(p, kv, acc * fade[:, None], wx, ws, wr, once, W_KIND, TILE, D, ROPE)

        if C_KIND >= 0:
            cx, cs, cr = fetch(compressed, places(c_block, c_at, c_stride, c_row, C_STATES, C_ALIGN), c_ready, C_KIND, D, ROPE, C_ALIGN)
            c_at = chosen_rows(mine, c_begin * TILE + TILE + step, c_bound, some, c_ready)
            c_block = block_of(c_mine, c_at, c_blocks - 1, c_ready, C_STATES)
            ahead = chosen_rows(mine, c_begin * TILE + 2 * TILE + step, c_bound, some, c_ready)
            kv = decode(cx, cs, cr, C_KIND, TILE, D, ROPE)
            for i in tl.range(c_begin, c_stop, num_stages=1, disable_licm=True):
                cx, cs, cr = fetch(compressed, places(c_block, c_at, c_stride, c_row, C_STATES, C_ALIGN), None, C_KIND, D, ROPE, C_ALIGN)
                c_at = ahead
                c_block = block_of(c_mine, c_at, c_blocks - 1, None, C_STATES)
                ahead = chosen_rows(mine, i * TILE + 3 * TILE + step, c_bound, some, None)
                score = _dot(asked, tl.trans(kv), tl.zeros([HEADS, TILE], tl.float32))
                if i * TILE + TILE > hole:
                    which = i * TILE + step
                    seen = tl.load(mine + which, mask=which < c_held, other=-1) >= 0
                    score = tl.where(seen[None, :], score, float("-inf"))
                peak, total, fade, p = _softmax(score, scale, peak, total)
                acc, kv = _apply(p, kv, acc * fade[:, None], cx, cs, cr, once, C_KIND, TILE, D, ROPE)

        # The sink is counted once.
        own = tl.exp2(tl.load(sink + head, mask=real, other=0.0) * 1.4426950408889634 - peak)
        weight = tl.sum(total, 1) + tl.where(split == 0, own, 0.0)
        if not SPLIT:
            factor = tl.where(weight > 0, BIAS / weight, 0.0)
            out = turned_back(acc * factor[:, None], cos, sin, HEADS, D, ROPE)
            tl.store(o + (row * heads + head[:, None]) * D + column[None, :], out, mask=real[:, None])
        else:
            into = (split.to(tl.int64) * rows + row) * heads + head
            tl.store(part + into[:, None] * D + column[None, :], acc, mask=real[:, None])
            tl.store(peaks + into, peak, mask=real)
            tl.store(totals + into, weight, mask=real)
        asked = tl.zeros([HEADS, D], tl.bfloat16)


@triton.jit(do_not_specialize=["rows", "heads"])
def _combine(
    part, peaks, totals, positions, freq, o, rows, heads, D: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
):
    """Adds a row's splits in their order, for HEADS heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    column = tl.arange(0, D)
    at = row * heads + head
    apart = rows.to(tl.int64) * heads
    peak = tl.full([HEADS], _LOWEST, tl.float32)
    for s in tl.static_range(SPLITS):
        peak = tl.maximum(peak, tl.load(peaks + s * apart + at, mask=real, other=_LOWEST))
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    for s in tl.static_range(SPLITS):
        fade = tl.exp2(tl.load(peaks + s * apart + at, mask=real, other=_LOWEST) - peak)
        total += fade * tl.load(totals + s * apart + at, mask=real, other=0.0)
        acc += fade[:, None] * tl.load(part + (s * apart + at)[:, None] * D + column[None, :], mask=real[:, None], other=0.0)
    cos, sin = turns(tl.load(positions + row), freq, ROPE)
    out = turned_back(acc * tl.where(total > 0, BIAS / total, 0.0)[:, None], cos, sin, HEADS, D, ROPE)
    tl.store(o + at[:, None] * D + column[None, :], out, mask=real[:, None])
