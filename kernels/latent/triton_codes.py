# SPDX-License-Identifier: Apache-2.0
"""Roundings inside Triton kernels, as `formats` does them: E4M3, E2M1 and their exponents.

Compiled, bf16 and E4M3 are the hardware's conversions.  Triton's interpreter truncates, so there the same
roundings are made of integers.  Importing this module imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import INTERPRETED, to_bf16



@triton.jit
def to_bf16_once(x):
    """`to_bf16` for values that go to memory and into a product: the compiler must not compute them for each apart."""
    if INTERPRETED:
        return to_bf16(x)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def e4m3_bytes(x):
    """float32 -> E4M3 bytes (uint8), to nearest, ties to even, saturating at 448; finite x."""
    if INTERPRETED:
        sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
        a = tl.minimum(tl.abs(x), 448.0)
        bits = a.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # 2^14 has steps of 2^-9, E4M3's smallest.
        small = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        return (tl.where(a < 0.015625, small, normal) + 128 * sign).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_values(byte):
    """E4M3 bytes of positive finite values -> float32."""
    code = byte.to(tl.int32)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, (((code >> 3) + 120 << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True))


@triton.jit
def e2m1_codes(x, scale):
    """x / scale as E2M1 codes 0..15 (int32), to nearest, ties to even, saturating at 6.

    x holds bf16 values, scale powers of two or E4M3 values.  The edges, 3 bits, times a scale, 4, are exact, and a quotient
    that is not an edge is 2^-9 of it away or more: rounding it to float32 first, as `formats` does, changes nothing.
    """
    a = tl.abs(x)
    code = (a > 0.25 * scale).to(tl.int32) + (a >= 0.75 * scale).to(tl.int32) + (a > 1.25 * scale).to(tl.int32)
    code += (a >= 1.75 * scale).to(tl.int32) + (a > 2.5 * scale).to(tl.int32) + (a >= 3.5 * scale).to(tl.int32) + (a > 5.0 * scale).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def fp8_exponent(largest):
    """ceil(log2(a / 448)) as int32 for normal positive float32 a.

    448 = 1.75 * 2^8, and a / 448 rounds to a power of two only where it is one: a step of a is more than half a step of the quotient.
    """
    return ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 135


@triton.jit
def fp4_exponent(largest):
    """ceil(log2(a / 6)) as int32 for normal positive float32 a; 6 = 1.5 * 2^2, else as `fp8_exponent`."""
    return ((largest.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - 129


@triton.jit
def reciprocal(x):
    """1 / x to about an ulp for 2^-100 < |x| < 2^100, without the guards of a division."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def bf16_dot(a, b, c):
    """c + a b of bf16 tiles with float32 sums.  The interpreter would take bf16's bits for integers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        return tl.dot(a, b, c)
