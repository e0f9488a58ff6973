# SPDX-License-Identifier: Apache-2.0
"""E2M1 pairs into E4M3 in registers: what the experts' products do to each packed byte.

Importing this module imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import INTERPRETED



@triton.jit
def place(packed):
    """uint8 -> (E4M3 bits of the low nibbles, of the high ones), each value times 2^-6; zero and subnormal too.

    E2M1's s ee m lies in E4M3 as s 00ee m00, and both have their subnormals just below their lowest exponent.
    """
    if INTERPRETED:
        return ((packed & 7) << 2) | ((packed & 8) << 4), ((packed >> 2) & 0x1C) | (packed & 0x80)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c;
        shl.b32 a, $2, 2;
        shl.b32 b, $2, 4;
        shr.u32 c, $2, 2;
        and.b32 a, a, 0x1c1c1c1c;
        and.b32 c, c, 0x1c1c1c1c;
        lop3.b32 $0, a, b, 0x80808080, 0xf8;
        lop3.b32 $1, c, $2, 0x80808080, 0xf8;
        }""",
        "=&r,=&r,r", [packed], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
    )


@triton.jit
def tables(octaves):
    """int32 octaves 0..11 below 2^6 -> E4M3 bytes of (0, .5, 1, 1.5) and of (2, 3, 4, 6), each times 2^(6 - octaves)."""
    return 0x6C686000 - octaves * 0x08080800, 0x7C787470 - octaves * 0x08080808


@triton.jit
def look_up(packed, low, high):
    """uint8 and its tables, of the same shape -> (E4M3 bits of the low nibbles, of the high ones).

    Compiled, four bytes that follow each other in a thread share the first one's tables: so they must lie in one row
    and in one block of 32 columns.  They do where this is an operand of a product of 8-bit values (tests/gpu).
    """
    if INTERPRETED:
        code = packed.to(tl.int32)
        a, b = code & 7, (code >> 4) & 7
        a = (tl.where(a < 4, low >> (8 * a), high >> (8 * (a & 3))) & 0x7F) | ((code & 8) << 4)
        b = (tl.where(b < 4, low >> (8 * b), high >> (8 * (b & 3))) & 0x7F) | (code & 0x80)
        return a.to(tl.uint8), b.to(tl.uint8)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 m, n, a, b, s;
        and.b32 m, $2, 0x77777777;
        shr.u32 n, m, 16;
        prmt.b32 a, $3, $7, m;
        prmt.b32 b, $3, $7, n;
        shl.b32 s, $2, 4;
        prmt.b32 m, a, b, 0x6420;
        prmt.b32 n, a, b, 0x7531;
        lop3.b32 $0, m, s, 0x80808080, 0xf8;
        lop3.b32 $1, n, $2, 0x80808080, 0xf8;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r", [packed, low, high], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
    )


@triton.jit
def joined(low, high, ROWS: tl.constexpr):
    """Bits of low and high nibbles [ROWS, 16] -> bits [ROWS, 32]: the even columns, then the odd ones."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (ROWS, 32))


@triton.jit
def quarters(x, ROWS: tl.constexpr):
    """[ROWS, 64] -> its four [ROWS, 16]."""
    even, odd = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, 2, 16)), (0, 3, 1, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def stacked(first, second):
    """[R], [R] -> [2 R]."""
    return tl.reshape(tl.permute(tl.join(first, second), (1, 0)), (2 * first.shape[0],))


@triton.jit
def scale_of(word, BLOCK: tl.constexpr):
    """Byte BLOCK of int32 `word`, an E8M0 scale 2^(byte - 127), in float32; byte 0 is taken as 0, 255 as infinity."""
    shifted = word << (23 - 8 * BLOCK) if BLOCK < 3 else word >> 1
    return (shifted & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _in_unit(packed, octaves, ROWS: tl.constexpr):
    """Bytes [ROWS, 16] `octaves` [ROWS] below their unit -> bits [ROWS, 32]."""
    low, high = tables(octaves)
    low, high = look_up(packed, tl.broadcast_to(low[:, None], (ROWS, 16)), tl.broadcast_to(high[:, None], (ROWS, 16)))
    return joined(low, high, ROWS)


@triton.jit
def in_units(packed, word, ROWS: tl.constexpr):
    """Bytes [ROWS, 64] (128 columns) under four scales `word` [ROWS] -> (E4M3 [ROWS, 128] times 2^6, scale byte of the unit [ROWS]).

    The largest of the four scales is the unit; the others are up to 11 octaves below it, which E4M3 holds exactly.
    """
    a, b, c, d = word & 0xFF, (word >> 8) & 0xFF, (word >> 16) & 0xFF, (word >> 24) & 0xFF
    unit = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    p0, p1, p2, p3 = quarters(packed, ROWS)
    even = tl.join(_in_unit(p0, unit - a, ROWS), _in_unit(p2, unit - c, ROWS))
    odd = tl.join(_in_unit(p1, unit - b, ROWS), _in_unit(p3, unit - d, ROWS))
    bits = tl.permute(tl.join(even, odd), (0, 2, 3, 1))  # [ROWS, 32, 2, 2] -> [ROWS, 2, 2, 32]
    return tl.reshape(bits, (ROWS, 128)).to(tl.float8e4nv, bitcast=True), unit
