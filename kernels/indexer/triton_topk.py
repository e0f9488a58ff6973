# SPDX-License-Identifier: Apache-2.0
"""The exact k best of long rows of scores, ties to the lower place, in order.  Importing this module imports Triton.

A program holds a chunk of a row in registers, finds the bits of its k-th best value by halving an interval of them,
and writes what lies above, and of those equal to it the first, in their order.  A row of several chunks leaves a list
of k a chunk, which are taken as a row again: order is kept, so ties still go to the lower place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import INTERPRETED

# Ordered bits (`_ordered`) of -inf, which is never chosen; places without a value lie below.
_MINUS_INF = tl.constexpr(-2139095041)
_NOTHING = tl.constexpr(-2147483648)


@triton.jit
def _ordered(x):
    """int32 in the order of float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high):
    """floor((low + high) / 2) of int32 without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _put(at, which, value, mask):
    """at[which] = value for int32 (or float32's bits) where mask, from the thread that holds it: nothing is moved to merge writes that do not merge."""
    if INTERPRETED:
        tl.store(at + which, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $4, 0; mad.wide.s32 a, $2, 4, $1; @p st.global.b32 [a], $3; mov.b32 $0, 0; }",
            "=r,l,r,r,r", [at.to(tl.int64), which, value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )


@triton.jit
def _choose(u, k: tl.constexpr, N: tl.constexpr):
    """Which of u int32 [N] are its k best above -inf, and each chosen one's rank in order; how many they are."""
    low = tl.full([], _MINUS_INF + 1, tl.int32)
    # The least of k or more groups' largest is a bound from below; a thread's 32 values are a group, as they are laid out.
    GROUPS: tl.constexpr = N // 32
    if k <= GROUPS:
        low = tl.maximum(low, tl.min(tl.max(tl.max(tl.reshape(u, [8, GROUPS, 4]), 2), 0), 0))
    high = tl.minimum(tl.max(u, 0), 0x7FFFFFFE) + 1
    above_low = tl.sum((u >= low).to(tl.int32), 0)
    above_high = tl.full([], 0, tl.int32)
    middle = _middle(low, high)
    # `above_low` values are >= low, at least k of them; `above_high` < k are >= high.
    while (above_low > k) & (middle > low):
        above = tl.sum((u >= middle).to(tl.int32), 0)
        enough = above >= k
        low = tl.where(enough, middle, low)
        above_low = tl.where(enough, above, above_low)
        high = tl.where(enough, high, middle)
        above_high = tl.where(enough, above_high, above)
        middle = _middle(low, high)
    sure = u >= high
    maybe = (u >= low) & (u < high)
    # Two counts in one sum: at most 2047 above 2^20.
    before = tl.cumsum(tl.where(sure, 1 << 20, maybe.to(tl.int32)), 0)
    ties = tl.minimum(before & 0xFFFFF, k - above_high)
    chosen = sure | (maybe & ((before & 0xFFFFF) <= k - above_high))
    return chosen, (before >> 20) + ties - 1, tl.minimum(above_low, k)


@triton.jit
def _places(t, positions, req, requests, blocks, ratio, UNIT: tl.constexpr, GATHER: tl.constexpr):
    """(n, places): what row t chooses from, ceil(visible / UNIT), and how many scores it has: n, or its allowed blocks' keys."""
    position = tl.load(positions + t)
    visible = tl.where((tl.load(req + t) >= requests) | (position < 0), 0, (position + 1) // ratio).to(tl.int32)
    n = (visible + UNIT - 1) // UNIT
    if GATHER > 0:
        return n, tl.minimum(blocks, (visible + GATHER - 1) // GATHER) * GATHER
    else:
        return n, n


@triton.jit
def _fill(to, value, total, K: tl.constexpr, FILL: tl.constexpr):
    """to[total:K] = value."""
    at = tl.arange(0, FILL)
    tl.store(to + at, tl.full([FILL], value, tl.int32), mask=(at >= total) & (at < K))


@triton.jit
def _take_chunk(
    values, begins, places, allowed, to, to_bits, whole,
    K: tl.constexpr, FILL: tl.constexpr, SIZE: tl.constexpr, GATHER: tl.constexpr,
):
    """The K best of places begins .. begins + SIZE - 1 of a row: `whole` fills up with -1, else bits go beside the ids."""
    place = begins + tl.arange(0, SIZE)
    # Whole fours of a row, which ends with one: the mask allows wide loads.
    u = _ordered(tl.load(values + place, mask=place < (places + 3) // 4 * 4, other=0.0))
    u = tl.where(place < places, u, _NOTHING)
    chosen, rank, total = _choose(u, K, SIZE)
    ids = place
    if GATHER > 0:
        ids = tl.load(allowed + place // GATHER, mask=chosen, other=0) * GATHER + place % GATHER
    _put(to, rank, ids, chosen)
    if whole:
        _fill(to, -1, total, K, FILL)
    else:
        _put(to_bits, rank, u, chosen)
        _fill(to_bits, _NOTHING, total, K, FILL)


@triton.jit(do_not_specialize=["begin", "requests", "blocks"])
def _first_level(
    values, values_stride, positions, req, allowed, allowed_stride, out, out_stride, list_bits, list_ids, list_stride,
    begin, requests, blocks, ratio,
    K: tl.constexpr, FILL: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr, GATHER: tl.constexpr,
):
    """Chunk program_id(1) of row begin + program_id(0): the end of it where the row has one chunk, else K for the list.

    n <= K are all chosen.  values [rows, a multiple of 4] from row `begin` on; out int32 [T, K];
    list [rows, chunks * K]: `_ordered` bits and ids.
    """
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    t = begin + i
    n, places = _places(t, positions, req, requests, blocks, ratio, UNIT, GATHER)
    to = out + t * out_stride
    values += i * values_stride
    if GATHER > 0:
        allowed += t * allowed_stride
    if n <= K:
        if chunk == 0:
            at = tl.arange(0, FILL)
            tl.store(to + at, tl.where(at < n, at, -1), mask=at < K)
    elif places <= CHUNK // 4:
        if chunk == 0:
            _take_chunk(values, 0, places, allowed, to, to, True, K, FILL, CHUNK // 4, GATHER)
    elif chunk * CHUNK < places:
        whole = places <= CHUNK
        at = i * list_stride + chunk * K
        to = tl.where(whole, to, list_ids + at)
        _take_chunk(values, chunk * CHUNK, places, allowed, to, list_bits + at, whole, K, FILL, CHUNK, GATHER)


@triton.jit
def _take_list(bits, ids, listed, to, K: tl.constexpr, FILL: tl.constexpr, SIZE: tl.constexpr):
    """The K best of a list."""
    place = tl.arange(0, SIZE)
    chosen, rank, total = _choose(tl.load(bits + place, mask=place < listed, other=_NOTHING), K, SIZE)
    _put(to, rank, tl.load(ids + place, mask=chosen, other=0), chosen)
    _fill(to, -1, total, K, FILL)


@triton.jit(do_not_specialize=["begin", "requests", "blocks"])
def _second_level(
    positions, req, out, out_stride, list_bits, list_ids, list_stride, begin, requests, blocks, ratio,
    K: tl.constexpr, FILL: tl.constexpr, CHUNK: tl.constexpr, LIST: tl.constexpr, UNIT: tl.constexpr, GATHER: tl.constexpr,
):
    """Row begin + program_id(0), if it has several chunks: the K best of its list of up to LIST."""
    i = tl.program_id(0).to(tl.int64)
    t = begin + i
    n, places = _places(t, positions, req, requests, blocks, ratio, UNIT, GATHER)
    if (n > K) & (places > CHUNK):
        listed = (places + CHUNK - 1) // CHUNK * K
        bits, ids, to = list_bits + i * list_stride, list_ids + i * list_stride, out + t * out_stride
        if listed <= LIST // 8:
            _take_list(bits, ids, listed, to, K, FILL, LIST // 8)
        else:
            _take_list(bits, ids, listed, to, K, FILL, LIST)
