# SPDX-License-Identifier: Apache-2.0
"""Scores of paged index keys, each key read once for all rows of a tile.  Importing this module imports Triton.

A score's bits depend on its row and its key alone: a dot product of DIM columns in one fixed order, a sum over heads
in one fixed order, whatever else the tile holds and wherever the key lies in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import INTERPRETED
from .triton_decode import fp4_keys, fp8_keys


@triton.jit
def _weighted(dots, w, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """dots [KEYS, ROWS * HEADS], w half the weights [ROWS * HEADS] -> sum over heads of w relu(dots) [KEYS, ROWS]."""
    twice = dots + tl.abs(dots)
    return tl.sum(tl.reshape(twice * w[None], [KEYS, ROWS, HEADS]), 2)


@triton.jit
def _dot(keys, q):
    if INTERPRETED:  # the interpreter multiplies the bits of bf16
        return tl.dot(keys.to(tl.float32), q.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(keys, q)


@triton.jit
def _word(at, WORDS: tl.constexpr):
    """The little-endian word at each pointer, to words or (the tiny model's records are not made of them) to bytes: int32."""
    if WORDS:
        return tl.load(at)
    else:
        return tl.load(at).to(tl.int32) | tl.load(at + 1).to(tl.int32) << 8 | tl.load(at + 2).to(tl.int32) << 16 | tl.load(at + 3).to(tl.int32) << 24


@triton.jit
def _lookup(
    at, span, most, allowed, table, block_stride,
    KEYS: tl.constexpr, UNIT: tl.constexpr, STATES: tl.constexpr, GATHER: tl.constexpr, STEP: tl.constexpr,
):
    """First keys int32 [KEYS / UNIT] and offsets int64 of the groups of UNIT keys, each in one page, from place `at` on.

    A group without a key to be read has the offset of the request's first keys instead.
    """
    start = at + tl.arange(0, KEYS // UNIT) * UNIT
    if GATHER > 0:
        block = tl.load(allowed + start // GATHER, mask=start < span, other=-1)
        start = tl.where(block >= 0, block * GATHER + start % GATHER, most)
    begins = tl.where(start < most, start, 0)
    page = tl.load(table + begins // STATES).to(tl.int64)
    return start, page * block_stride + begins % STATES * STEP


@triton.jit
def _fetch(cache, words, base, DIM: tl.constexpr, UNIT: tl.constexpr, FP4: tl.constexpr, STEP: tl.constexpr, WORDS: tl.constexpr):
    """Records of UNIT keys from each of the offsets on: (words int32 [.., UNIT, n], scales)."""
    UNITS: tl.constexpr = 4 if WORDS else 1  # bytes of an offset
    inner = tl.arange(0, UNIT)[None, :] * STEP
    base = base[:, None]
    if FP4:
        word = tl.arange(0, DIM // 8)[None, None, :]
        x = _word((words + base)[:, :, None] + (inner[:, :, None] + word * (4 // UNITS)), WORDS)
        if DIM == 128:
            scale = _word(words + base + (inner + DIM // 2 // UNITS), WORDS)
        else:
            scale = tl.load((cache + base * UNITS)[:, :, None] + (inner[:, :, None] * UNITS + DIM // 2 + word // 4)).to(tl.int32)
    else:
        word = tl.arange(0, DIM // 4)[None, None, :]
        x = _word((words + base)[:, :, None] + (inner[:, :, None] + word * (4 // UNITS)), WORDS)
        scale = _word(words + base + (inner + DIM // UNITS), WORDS)
    return x, scale


@triton.jit
def _tile_scores(
    row0, count, r, most, span,
    q, weights, positions, scores, scores_stride, best, best_stride, cache, words, block_stride, table, table_stride,
    allowed, allowed_stride, begin, parts, ratio,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FP4: tl.constexpr,
    WIDTH: tl.constexpr, STATES: tl.constexpr, UNIT: tl.constexpr, SOURCE: tl.constexpr, GATHER: tl.constexpr,
):
    """`_scores` of up to ROWS rows of request r, from row0 on."""
    WORDS: tl.constexpr = WIDTH % 4 == 0
    STEP: tl.constexpr = WIDTH // 4 if WORDS else WIDTH
    row = tl.arange(0, ROWS)
    to = (row0 - begin + row).to(tl.int64)
    visible = ((tl.load(positions + row0 + row, mask=row < count, other=-1) + 1) // ratio).to(tl.int32)
    column = tl.arange(0, ROWS * HEADS)
    q += (row0 - begin).to(tl.int64) * HEADS * DIM
    w = tl.load(weights + (row0 - begin).to(tl.int64) * HEADS + column, mask=column < count * HEADS, other=0.0)
    queries = tl.load(q + column[None] * DIM + tl.arange(0, DIM)[:, None], mask=column[None] < count * HEADS, other=0.0)
    inner = tl.arange(0, UNIT)
    table += r * table_stride
    mine = table
    if GATHER > 0:
        mine = allowed + row0.to(tl.int64) * allowed_stride
    begins, step = tl.program_id(1) * KEYS, parts * KEYS
    # Keys are fetched a tile ahead, the addresses of a tile two ahead.
    start, base = _lookup(begins, span, most, mine, table, block_stride, KEYS, UNIT, STATES, GATHER, STEP)
    x, scale = _fetch(cache, words, base, DIM, UNIT, FP4, STEP, WORDS)
    start1, base1 = _lookup(begins + step, span, most, mine, table, block_stride, KEYS, UNIT, STATES, GATHER, STEP)
    for at in tl.range(begins, span, step, num_stages=1):
        x1, scale1 = _fetch(cache, words, base1, DIM, UNIT, FP4, STEP, WORDS)
        start2, base2 = _lookup(at + 2 * step, span, most, mine, table, block_stride, KEYS, UNIT, STATES, GATHER, STEP)
        if FP4:
            if DIM == 128:
                byte = (scale[:, :, None] >> (tl.arange(0, DIM // 8)[None, None, :] // 4 * 8)) & 255
            else:
                byte = scale
            decoded = fp4_keys(tl.reshape(x, [KEYS, DIM // 8]), tl.reshape(byte, [KEYS, DIM // 8]), KEYS, DIM)
            score = _weighted(_dot(decoded, queries), w, KEYS, ROWS, HEADS)
        else:
            dots = tl.dot(fp8_keys(tl.reshape(x, [KEYS, DIM // 4]), KEYS, DIM), queries, max_num_imprecise_acc=DIM)
            score = _weighted(dots, w, KEYS, ROWS, HEADS) * tl.reshape(scale.to(tl.float32, bitcast=True), [KEYS])[:, None]
        key = tl.reshape(start[:, None] + inner[None], [KEYS])
        place = at + tl.arange(0, KEYS)
        score = score + 0.0  # -0 ties with 0
        seen = key[:, None] < visible[None]
        if GATHER > 0:
            score = tl.where(seen, score, float("-inf"))
            seen = (place < span)[:, None] & (row < count)[None]
        tl.store(scores + to[None] * scores_stride + place[:, None], score, mask=seen)
        if SOURCE > 0:
            blocks_at = at // SOURCE + tl.arange(0, KEYS // SOURCE)
            top = tl.max(tl.reshape(tl.where(seen, score, float("-inf")), [KEYS // SOURCE, SOURCE, ROWS]), 1)
            last = (visible - 1) // SOURCE
            top = tl.where(blocks_at[:, None] == last[None], float("inf"), top)
            inside = (blocks_at[:, None] <= last[None]) & (visible > 0)[None]
            tl.store(best + to[None] * best_stride + blocks_at[:, None], top, mask=inside)
        x, scale, start = x1, scale1, start1
        start1, base1 = start2, base2


@triton.jit(do_not_specialize=["blocks", "begin", "parts"])
def _scores(
    q, weights, tiles, positions, scores, scores_stride, best, best_stride, cache, words, block_stride, table, table_stride,
    allowed, allowed_stride, blocks, begin, parts, ratio,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FP4: tl.constexpr,
    WIDTH: tl.constexpr, STATES: tl.constexpr, UNIT: tl.constexpr, SOURCE: tl.constexpr, GATHER: tl.constexpr, FEWEST: tl.constexpr,
):
    """Every parts-th tile of KEYS keys, from the program_id(1)-th on, for the rows of tile program_id(0).

    scores [rows, bound]; SOURCE > 0: also best [rows, blocks], the best score of SOURCE keys, +inf for the block of the
    last visible one; GATHER > 0: keys are those of the row's allowed blocks of GATHER, scores [rows, allowed keys].
    block_stride: in words where records are made of them, else in bytes. UNIT: keys that lie in one page (and one allowed block),
    a power of two; whole groups of them are read if their first is. FEWEST: the least ROWS.
    """
    tile = tl.program_id(0)
    row0 = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    r = tl.load(tiles + tile * 4 + 2).to(tl.int64)
    most = tl.load(tiles + tile * 4 + 3)
    if GATHER > 0:
        span = tl.minimum(blocks, (most + GATHER - 1) // GATHER) * GATHER
    else:
        span = most
    if tl.program_id(1) * KEYS < span:
        # A request's last rows may be few: a matrix product of fewer columns has the same bits.
        if ROWS >= 2 * FEWEST and count <= ROWS // 2:
            _tile_scores(
                row0, count, r, most, span, q, weights, positions, scores, scores_stride, best, best_stride, cache, words, block_stride,
                table, table_stride, allowed, allowed_stride, begin, parts, ratio,
                HEADS, DIM, ROWS // 2, KEYS, FP4, WIDTH, STATES, UNIT, SOURCE, GATHER,
            )
        else:
            _tile_scores(
                row0, count, r, most, span, q, weights, positions, scores, scores_stride, best, best_stride, cache, words, block_stride,
                table, table_stride, allowed, allowed_stride, begin, parts, ratio,
                HEADS, DIM, ROWS, KEYS, FP4, WIDTH, STATES, UNIT, SOURCE, GATHER,
            )
