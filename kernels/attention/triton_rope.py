# SPDX-License-Identifier: Apache-2.0
"""RoPE inside Triton's attention: q as it is loaded, o before it is stored.  Importing this module imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import INTERPRETED, to_bf16
from .triton_records import natural, ordered


@triton.jit
def turns(position, freq, ROPE: tl.constexpr):
    """cos and sin float32 [ROPE / 2] of a row's pairs. The approximations are good to 2^-20 in the one turn left to them."""
    angle = position.to(tl.float64) * tl.load(freq + tl.arange(0, ROPE // 2))
    angle -= tl.floor(angle * 0.15915494309189535 + 0.5) * 6.283185307179586
    angle = angle.to(tl.float32)
    if INTERPRETED:
        cos, sin = tl.cos(angle), tl.sin(angle)
    else:
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=r,r", [angle], dtype=tl.float32, is_pure=True, pack=1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=r,r", [angle], dtype=tl.float32, is_pure=True, pack=1)
    return cos, sin


@triton.jit
def query(q, at, real, cos, sin, HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """q [HEADS, D] bf16 at offsets `at` [HEADS], its last ROPE dims turned, ordered. Pairs are loaded as words."""
    at, real = at[:, None], real[:, None]
    pairs = (q + at).to(tl.pointer_type(tl.int32)) + tl.arange(0, D // 2)[None, :]
    tail = (q + at + (D - ROPE)).to(tl.pointer_type(tl.int32)) + tl.arange(0, ROPE // 2)[None, :]
    pairs, tail = tl.load(pairs, mask=real, other=0), tl.load(tail, mask=real, other=0)
    even, odd = (tail << 16).to(tl.float32, bitcast=True), (tail & -65536).to(tl.float32, bitcast=True)
    cos, sin = cos[None, :], sin[None, :]
    low = to_bf16(even * cos - odd * sin).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = to_bf16(even * sin + odd * cos).to(tl.int16, bitcast=True).to(tl.int32) << 16
    shape: tl.constexpr = [HEADS, D // ROPE, ROPE // 2]
    last = tl.arange(0, D // ROPE)[None, :, None] == D // ROPE - 1
    pairs = tl.where(last, tl.broadcast_to((low | high)[:, None, :], shape), tl.reshape(pairs, shape))
    pairs = tl.reshape(pairs, [HEADS, D // 2])
    values = tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), [HEADS, D])
    return ordered(values.to(tl.bfloat16, bitcast=True), HEADS, D)


@triton.jit
def turned_back(x, cos, sin, HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """x [HEADS, D] float32, ordered -> bf16 in natural columns, its last ROPE dims turned back."""
    x = tl.reshape(natural(to_bf16(x), HEADS, D), [HEADS, D // ROPE, ROPE // 2, 2])
    even, odd = tl.split(x.to(tl.float32))
    last = tl.arange(0, D // ROPE)[:, None] == D // ROPE - 1
    cos, sin = tl.where(last, cos[None, :], 1.0)[None, :, :], tl.where(last, sin[None, :], 0.0)[None, :, :]
    return tl.reshape(to_bf16(tl.join(even * cos + odd * sin, odd * cos - even * sin)), [HEADS, D])
