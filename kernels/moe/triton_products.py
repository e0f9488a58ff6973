# SPDX-License-Identifier: Apache-2.0
"""The experts' two products over packed weights, and the sum of a row's experts.

Weights are the left operand, E4M3 in registers; FP8 rows of pairs are the right one, through shared memory.
Importing this module imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import power_of_two, to_bf16, to_e4m3
from .triton_group import ceil_exponent
from .triton_mxfp4 import in_units, joined, place, quarters, scale_of, stacked

# What `in_units` and `place` leave on their values.
_UNIT = tl.constexpr(2.0**-6)
_PLACED = tl.constexpr(2.0**6)


@triton.jit
def _factor(h_scale, at, slots, used, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scales [BLOCK_N] of one group of columns; nothing to read without groups."""
    if GROUPS:
        return tl.load(h_scale + at + slots, mask=used, other=0.0)
    return tl.zeros([BLOCK_N], tl.float32)


@triton.jit
def _block(packed, q, used, at, scale, M: tl.constexpr):
    """Bytes [M, 16] times columns `at` to `at` + 31 of the rows `q`, scaled: [M, BLOCK_N]."""
    low, high = place(packed)
    b = tl.load(q[None, :] + (at + tl.arange(0, 32)[:, None]), mask=used[None, :], other=0.0)
    return tl.dot(joined(low, high, M).to(tl.float8e4nv, bitcast=True), b) * scale[:, None]


@triton.jit
def _product(packed, at, row, words, upper_rows, lower_rows, q, used, h_scale, slots, blocks, M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """M rows of weights, `packed` at (at, row), times rows `q` [BLOCK_N], over `blocks` of 128 columns: float32 [M / 2, BLOCK_N]
    of the upper half of the weights' rows and the same of the lower.  Each 32 columns' sum is scaled: scales of any spread.

    upper_rows, lower_rows [M / 2] of `words`: their scales, an int32 for 128 columns.  Each has fewer elements than the
    program has threads: such loads the compiler makes where they are needed, larger ones go through shared memory.
    Of a sector of scales a step takes an eighth: they are to stay in L1, which is why shared memory is not used up.
    slots [BLOCK_N]: where in `h_scale` the rows' scales of 128 / GROUPS columns begin; without GROUPS not looked at.
    """
    acc = tl.zeros([M, BLOCK_N], tl.float32)
    upper_at = upper_rows * blocks
    lower_at = lower_rows * blocks
    upper_word = tl.load(words + upper_at, eviction_policy="evict_last")
    lower_word = tl.load(words + lower_at, eviction_policy="evict_last")
    h0 = _factor(h_scale, 0, slots, used, GROUPS, BLOCK_N)
    h1 = _factor(h_scale, GROUPS - 1, slots, used, GROUPS, BLOCK_N)
    for i in range(0, blocks):
        # Scales come a block early: they are not copied ahead as operands are.
        ahead = tl.minimum(i + 1, blocks - 1)
        next_upper = tl.load(words + ahead + upper_at, eviction_policy="evict_last")
        next_lower = tl.load(words + ahead + lower_at, eviction_policy="evict_last")
        next_h0 = _factor(h_scale, ahead * GROUPS, slots, used, GROUPS, BLOCK_N)
        next_h1 = _factor(h_scale, ahead * GROUPS + GROUPS - 1, slots, used, GROUPS, BLOCK_N)
        word = stacked(upper_word, lower_word)
        p0, p1, p2, p3 = quarters(tl.reshape(packed.load([at, row, i * 64]), (M, 64)), M)
        if GROUPS:
            part = _block(p0, q, used, i * 128, scale_of(word, 0), M)
            part += _block(p1, q, used, i * 128 + 32, scale_of(word, 1), M)
            acc += part * h0[None, :]
            part = _block(p2, q, used, i * 128 + 64, scale_of(word, 2), M)
            part += _block(p3, q, used, i * 128 + 96, scale_of(word, 3), M)
            acc += part * h1[None, :]
        else:
            acc += _block(p0, q, used, i * 128, scale_of(word, 0), M)
            acc += _block(p1, q, used, i * 128 + 32, scale_of(word, 1), M)
            acc += _block(p2, q, used, i * 128 + 64, scale_of(word, 2), M)
            acc += _block(p3, q, used, i * 128 + 96, scale_of(word, 3), M)
        upper_word, lower_word, h0, h1 = next_upper, next_lower, next_h0, next_h1
    acc *= _PLACED
    return tl.split(tl.permute(tl.reshape(acc, (2, M // 2, BLOCK_N)), (1, 2, 0)))


@triton.jit
def _table_product(packed, at, row, words, upper_rows, lower_rows, left, left_used, right, right_used, blocks, M: tl.constexpr, N: tl.constexpr, BOTH: tl.constexpr):
    """`_product` of narrow weights with rows `left` [N] and, if BOTH, `right` [N]: (upper left, lower left, upper right, lower right).

    Scales of 32 columns lie in the E4M3 values, sums of 128 columns are scaled.  By halves and sides, so that of
    the sums of 128 only [M / 2, N] need registers beside those of all columns.
    """
    H: tl.constexpr = M // 2
    upper_left = tl.zeros([H, N], tl.float32)
    lower_left = tl.zeros([H, N], tl.float32)
    upper_right = tl.zeros([H, N], tl.float32)
    lower_right = tl.zeros([H, N], tl.float32)
    column = tl.arange(0, 128)[:, None]
    upper_at = upper_rows * blocks
    lower_at = lower_rows * blocks
    upper_word = tl.load(words + upper_at, eviction_policy="evict_last")
    lower_word = tl.load(words + lower_at, eviction_policy="evict_last")
    for i in range(0, blocks):
        ahead = tl.minimum(i + 1, blocks - 1)
        next_upper = tl.load(words + ahead + upper_at, eviction_policy="evict_last")
        next_lower = tl.load(words + ahead + lower_at, eviction_policy="evict_last")
        upper, lower = tl.split(tl.permute(tl.reshape(packed.load([at, row, i * 64]), (2, H, 64)), (1, 2, 0)))
        b = tl.load(left[None, :] + (i * 128 + column), mask=left_used[None, :], other=0.0)
        if BOTH:
            c = tl.load(right[None, :] + (i * 128 + column), mask=right_used[None, :], other=0.0)
        a, unit = in_units(upper, upper_word, H)
        scale = scale_of(unit, 0)[:, None]
        upper_left += tl.dot(a, b) * scale
        if BOTH:
            upper_right += tl.dot(a, c) * scale
        a, unit = in_units(lower, lower_word, H)
        scale = scale_of(unit, 0)[:, None]
        lower_left += tl.dot(a, b) * scale
        if BOTH:
            lower_right += tl.dot(a, c) * scale
        upper_word, lower_word = next_upper, next_lower
    return upper_left * _UNIT, lower_left * _UNIT, upper_right * _UNIT, lower_right * _UNIT


@triton.jit
def _tile(expert, tiles, ROWS: tl.constexpr):
    """(tile of pairs, its expert, first of the program's weight rows).  Programs that share pairs follow each other."""
    tile = tl.program_id(0) // tiles
    return tile.to(tl.int64), tl.load(expert + tile), tl.program_id(0) % tiles * ROWS


@triton.jit
def _store_h(
    gate, up, slot, first, q_scale, pair, weights, h, h_scale, inner, tiles, k, limit,
    TILE_F: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE_ROWS: tl.constexpr,
):
    """Gate and up [TILE_F, BLOCK_N] of the pairs in slots `slot` [BLOCK_N] -> their columns of `h`."""
    p = tl.load(pair + slot)  # again: not held through the product
    used = p >= 0
    factor = tl.load(q_scale + p // k, mask=used, other=0.0)[None, :]
    gate = tl.minimum(to_bf16(gate * factor).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(to_bf16(up * factor).to(tl.float32), -limit), limit)
    share = tl.load(weights + p, mask=used, other=0.0).to(tl.float32)
    value = to_bf16(gate / (1.0 + tl.exp(-gate)) * up * share[None, :])
    at = h + slot[None, :] * inner + (first + tl.arange(0, TILE_F))[:, None]
    if WHOLE_ROWS:
        tl.store(at, value, mask=used[None, :])
    else:
        value = value.to(tl.float32)
        exponent = ceil_exponent(tl.maximum(tl.max(tl.abs(value), 0), 1e-4))
        value = to_e4m3(value * power_of_two(-exponent)[None, :])
        value = tl.permute(tl.reshape(value, (TILE_F // 32, 16, 2, BLOCK_N)), (0, 2, 1, 3))
        tl.store(at, tl.reshape(value, (TILE_F, BLOCK_N)), mask=used[None, :])
        tl.store(h_scale + slot * tiles + first // TILE_F, power_of_two(exponent), mask=used)


@triton.jit(do_not_specialize=["k"])
def gate_up(
    packed, words, q, q_scale, expert, pair, weights, h, h_scale, blocks, inner, tiles, k, limit,
    TILE_F: tl.constexpr, BLOCK_N: tl.constexpr, TABLE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
):
    """TILE_F rows of gate and the same of up for one tile of pairs -> TILE_F columns of `h`."""
    tile, e, first = _tile(expert, tiles, TILE_F)
    if e < 0:
        return
    BOTH: tl.constexpr = TABLE and BLOCK_N > 64
    N: tl.constexpr = BLOCK_N // 2 if BOTH else BLOCK_N
    row = 2 * e * inner + first + tl.arange(0, TILE_F)
    slot = tile * BLOCK_N + tl.arange(0, N)
    p = tl.load(pair + slot)
    used = p >= 0
    token = tl.where(used, p // k, 0).to(tl.int64)
    if TABLE:
        used2, token2 = used, token
        if BOTH:
            p2 = tl.load(pair + slot + N)
            used2 = p2 >= 0
            token2 = tl.where(used2, p2 // k, 0).to(tl.int64)
        gate, up, gate2, up2 = _table_product(
            packed, 2 * e, first, words, row, row + inner, q + token * (blocks * 128), used, q + token2 * (blocks * 128), used2, blocks, 2 * TILE_F, N, BOTH,
        )
        if BOTH:
            _store_h(gate2, up2, slot + N, first, q_scale, pair, weights, h, h_scale, inner, tiles, k, limit, TILE_F, N, WHOLE_ROWS)
    else:
        gate, up = _product(packed, 2 * e, first, words, row, row + inner, q + token * (blocks * 128), used, h_scale, slot, blocks, 2 * TILE_F, N, 0)
    _store_h(gate, up, slot, first, q_scale, pair, weights, h, h_scale, inner, tiles, k, limit, TILE_F, N, WHOLE_ROWS)


@triton.jit
def _store_y(upper, lower, slot, first, pair, h_scale, y, hidden, HALF: tl.constexpr, WHOLE_ROWS: tl.constexpr):
    """Halves [HALF, BLOCK_N] of the pairs in slots `slot` [BLOCK_N] -> bf16 columns of `y`."""
    p = tl.load(pair + slot)
    used = p >= 0
    if WHOLE_ROWS:
        factor = tl.load(h_scale + slot, mask=used, other=0.0)[None, :]
        upper, lower = upper * factor, lower * factor
    at = y + p.to(tl.int64)[None, :] * hidden + (first + tl.arange(0, HALF))[:, None]
    tl.store(at, to_bf16(upper), mask=used[None, :])
    tl.store(at + HALF, to_bf16(lower), mask=used[None, :])


@triton.jit
def down(
    packed, words, h, h_scale, expert, pair, y, blocks, hidden, tiles,
    TILE_D: tl.constexpr, BLOCK_N: tl.constexpr, TABLE: tl.constexpr, GROUPS: tl.constexpr,
):
    """TILE_D columns of `y` for one tile of pairs; h's scales are for 128 / GROUPS columns each, or for rows (0)."""
    tile, e, first = _tile(expert, tiles, TILE_D)
    if e < 0:
        return
    BOTH: tl.constexpr = TABLE and BLOCK_N > 64
    N: tl.constexpr = BLOCK_N // 2 if BOTH else BLOCK_N
    HALF: tl.constexpr = TILE_D // 2
    row = e * hidden + first + tl.arange(0, HALF)
    slot = tile * BLOCK_N + tl.arange(0, N)
    used = tl.load(pair + slot) >= 0
    rows = h + slot * (blocks * 128)
    if TABLE:
        used2 = used
        if BOTH:
            used2 = tl.load(pair + slot + N) >= 0
        upper, lower, upper2, lower2 = _table_product(
            packed, e, first, words, row, row + HALF, rows, used, rows + N * (blocks * 128), used2, blocks, TILE_D, N, BOTH,
        )
        if BOTH:
            _store_y(upper2, lower2, slot + N, first, pair, h_scale, y, hidden, HALF, GROUPS == 0)
    else:
        slots = tl.arange(0, N) * (blocks * GROUPS)
        upper, lower = _product(
            packed, e, first, words, row, row + HALF, rows, used, h_scale + tile * (BLOCK_N * blocks * GROUPS), slots, blocks, TILE_D, N, GROUPS,
        )
    _store_y(upper, lower, slot, first, pair, h_scale, y, hidden, HALF, GROUPS == 0)


@triton.jit(do_not_specialize=["first_expert", "experts"])
def reduce(y, ids, row_stride, choice_stride, beside, out, hidden, first_expert, experts, K: tl.constexpr, COLUMNS: tl.constexpr):
    """One row: the sum of its pairs that are held here, in the order of its choices, and then `beside` if there is one."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(K):
        # A sum, so that the condition is as wide as the mask.
        e = column * 0 + tl.load(ids + row * row_stride + i * choice_stride) - first_expert
        held = (e >= 0) & (e < experts)
        total += tl.load(y + (row * K + i) * hidden + column, mask=inside & held, other=0.0).to(tl.float32)
    if beside is not None:
        total += tl.load(beside + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if out.dtype.element_ty == tl.bfloat16:
        total = to_bf16(total)
    tl.store(out + row * hidden + column, total, mask=inside)
