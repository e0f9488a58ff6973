# SPDX-License-Identifier: Apache-2.0
"""Records of paged caches, gathered by address and decoded, inside Triton kernels.  Importing this module imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_records import decode_e2m1, decode_e4m3, decode_e4m3_bf16, e4m3_pair, e8m0_pair, words

WINDOW, GLOBAL, FP8_ROPE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def places(block, at, block_stride, row_stride, STATES: tl.constexpr, ALIGN: tl.constexpr):
    """Byte offsets int64 of rows `at` int32 that lie in `block` int32."""
    return tl.multiple_of(block.to(tl.int64) * block_stride + ((at % STATES) * row_stride).to(tl.int64), ALIGN)


@triton.jit
def fetch(cache, place, wanted, KIND: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, ALIGN: tl.constexpr):
    """Records at byte offsets `place` [N], if `wanted` at all: words of values, scales, and words of bf16 if there are such."""
    place = place[:, None]
    if wanted is not None:
        wanted = wanted[:, None]
    if KIND == GLOBAL:
        x = words(cache, place, 0, wanted, D // 8, ALIGN)
        scale = tl.load(cache + (place + D // 2 + tl.arange(0, D // 16)[None, :]), mask=wanted)
        turned = scale
    elif KIND == WINDOW:
        x = words(cache, place, 0, wanted, D // 4, ALIGN)
        scale = tl.load(cache + (place + D + tl.arange(0, D // 32)[None, :]), mask=wanted)
        turned = scale
    else:
        GROUP: tl.constexpr = 64 if D >= 64 else D
        group = tl.arange(0, D // GROUP)[None, :]
        x = words(cache, place, 0, wanted, D // 4, ALIGN)  # the last ones are bf16 or scales: not used
        scale = tl.load(cache + (place + D + ROPE + group), mask=wanted)
        turned = words(cache, place, D - ROPE, wanted, ROPE // 2, ALIGN)
    return x, scale, turned


@triton.jit
def decode(x, scale, turned, KIND: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """What `fetch` got -> bf16 [N, D], ordered, 2^-8 of the values."""
    if KIND == GLOBAL:
        return decode_e2m1(x, e4m3_pair(scale), N, D, 16)
    elif KIND == WINDOW:
        return decode_e4m3(x, e8m0_pair(scale), N, D, 32)
    else:
        return decode_e4m3_bf16(x, e8m0_pair(scale), turned, N, D, ROPE, 64 if D >= 64 else D)


@triton.jit
def block_of(table, at, last, wanted, STATES: tl.constexpr):
    """The blocks int32 that rows `at` lie in, if `wanted` at all."""
    return tl.load(table + tl.minimum(at // STATES, last), mask=wanted)


@triton.jit
def chosen_rows(mine, which, bound, some, wanted):
    """A row's choice int32 at places `which`, at most `bound`; `some` other one where there is none."""
    at = tl.load(mine + tl.minimum(which, bound), mask=wanted).to(tl.int32)
    return tl.where(at >= 0, at, some)


@triton.jit
def nothing(KIND: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """Zeros of `fetch`'s shapes."""
    if KIND == GLOBAL:
        x, scale = tl.zeros([N, D // 8], tl.int32), tl.zeros([N, D // 16], tl.uint8)
        turned = scale
    elif KIND == WINDOW:
        x, scale = tl.zeros([N, D // 4], tl.int32), tl.zeros([N, D // 32], tl.uint8)
        turned = scale
    else:
        x, scale = tl.zeros([N, D // 4], tl.int32), tl.zeros([N, D // 64 if D >= 64 else 1], tl.uint8)
        turned = tl.zeros([N, ROPE // 2], tl.int32)
    return x, scale, turned
