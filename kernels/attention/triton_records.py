# SPDX-License-Identifier: Apache-2.0
"""Cache records to bf16 inside Triton kernels, by placing bits; exact.  Importing this module imports Triton.

Decoded values are 2^-8 of the record's: so both kinds of scale fit bf16 beside the bias that placing bits leaves.
  E4M3 s eeee mmm  -> bf16 s 0000eeee mmm0000  = v 2^-120, times 2^112 s for an E8M0 scale s <= 2^15;
  E2M1 s ee m      -> bf16 s 000000ee m000000  = v 2^-126, times 2^118 s for an E4M3 scale s.
Subnormals come out as bf16's, which its products take as they are.

Columns come in an order of their own, so that a register holds two values out of one place of two words: position
2 r + h of every eight is column 4 h + r.  `ordered` brings another operand into it and `natural` back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import INTERPRETED


BIAS = tl.constexpr(256.0)  # what a decoded value is to be multiplied by

# Two words of E4M3 and a pair of multipliers -> four words of two bf16: columns r and 4 + r.
_E4M3 = tl.constexpr("""{
.reg .b32 a, b, x, y;
prmt.b32 a, $4, $5, 0x5410;
prmt.b32 b, $4, $5, 0x7632;
shl.b32 x, a, 4; shl.b32 y, a, 8;
and.b32 x, x, 0x07f007f0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $0, x, $6;
shr.u32 x, a, 4;
and.b32 x, x, 0x07f007f0; lop3.b32 x, a, 0x80008000, x, 0xea; mul.rn.bf16x2 $1, x, $6;
shl.b32 x, b, 4; shl.b32 y, b, 8;
and.b32 x, x, 0x07f007f0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $2, x, $6;
shr.u32 x, b, 4;
and.b32 x, x, 0x07f007f0; lop3.b32 x, b, 0x80008000, x, 0xea; mul.rn.bf16x2 $3, x, $6;
}""")
# A word of eight E2M1: nibbles r and 4 + r lie in one place of its halves already.
_E2M1 = tl.constexpr("""{
.reg .b32 x, y;
shl.b32 x, $4, 6; shl.b32 y, $4, 12;
and.b32 x, x, 0x01c001c0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $0, x, $5;
shl.b32 x, $4, 2; shl.b32 y, $4, 8;
and.b32 x, x, 0x01c001c0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $1, x, $5;
shr.u32 x, $4, 2; shl.b32 y, $4, 4;
and.b32 x, x, 0x01c001c0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $2, x, $5;
shr.u32 x, $4, 6;
and.b32 x, x, 0x01c001c0; lop3.b32 x, $4, 0x80008000, x, 0xea; mul.rn.bf16x2 $3, x, $5;
}""")


@triton.jit
def ordered(x, N: tl.constexpr, D: tl.constexpr):
    """[N, D] in natural columns -> the order of decoded records."""
    return tl.reshape(tl.permute(tl.reshape(x, [N, D // 8, 2, 4]), [0, 1, 3, 2]), [N, D])


@triton.jit
def natural(x, N: tl.constexpr, D: tl.constexpr):
    """The way back."""
    return tl.reshape(tl.permute(tl.reshape(x, [N, D // 8, 4, 2]), [0, 1, 3, 2]), [N, D])


@triton.jit
def _half(bits):
    """int32 bits of float32 that bf16 holds -> both halves of a register, as int32."""
    return (bits & -65536) | ((bits >> 16) & 0xFFFF)


@triton.jit
def e8m0_pair(scale):
    """E8M0 bytes -> 2^112 times the scale, as a pair of bf16 in int32."""
    return (tl.minimum(scale.to(tl.int32), 142) + 112) * 0x00800080


@triton.jit
def e4m3_pair(scale):
    """E4M3 bytes (positive) -> 2^118 times the scale, as a pair of bf16 in int32."""
    value = ((scale.to(tl.int32) & 0x7F) << 20).to(tl.float32, bitcast=True)
    return _half((value * (2.0**119) * (2.0**119)).to(tl.int32, bitcast=True))


@triton.jit
def words(x, place, offset, wanted, COUNT: tl.constexpr, ALIGN: tl.constexpr):
    """COUNT words int32 from each of the addresses x + place [N, 1] + offset, which are multiples of ALIGN bytes."""
    word = tl.arange(0, COUNT)[None, :]
    if ALIGN % 4 == 0:
        out = tl.load((x + (place + offset)).to(tl.pointer_type(tl.int32)) + word, mask=wanted)
    else:
        at = x + (place + offset + 4 * word)
        out = tl.load(at, mask=wanted).to(tl.int32)
        for i in tl.static_range(1, 4):
            out |= tl.load(at + i, mask=wanted).to(tl.int32) << (8 * i)
    return out


@triton.jit
def _times(x, pair):
    """mul.rn.bf16x2 for a pair of equal multipliers, all as int32."""
    factor = (pair << 16).to(tl.float32, bitcast=True)
    low = ((x << 16).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    high = ((x & -65536).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    return (high & -65536) | ((low >> 16) & 0xFFFF)


@triton.jit
def _times_pair(x, pair):
    if INTERPRETED:
        x = _times(x, pair)
    else:
        x = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, pair], dtype=tl.int32, is_pure=True, pack=1)
    return x


@triton.jit
def _values(a, b, c, d, N: tl.constexpr, D: tl.constexpr):
    """Four words [N, D / 8] of two bf16 each -> bf16 [N, D]."""
    word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N, D // 2])
    both = tl.join(word.to(tl.int16), (word >> 16).to(tl.int16))
    return tl.reshape(both, [N, D]).to(tl.bfloat16, bitcast=True)


@triton.jit
def _e4m3_words(x, pair, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """Words [N, D / 4] and multipliers [N, D / GROUP] -> four words [N, D / 8] of columns r and 4 + r of every eight."""
    pair = tl.reshape(tl.broadcast_to(pair[:, :, None], [N, D // GROUP, GROUP // 8]), [N, D // 8])
    x, y = tl.split(tl.reshape(x, [N, D // 8, 2]))
    if INTERPRETED:
        low, high = (x & 0xFFFF) | (y << 16), ((x >> 16) & 0xFFFF) | (y & -65536)
        a = _times(((low << 4) & 0x07F007F0) | ((low << 8) & -0x7FFF8000), pair)
        b = _times(((low >> 4) & 0x07F007F0) | (low & -0x7FFF8000), pair)
        c = _times(((high << 4) & 0x07F007F0) | ((high << 8) & -0x7FFF8000), pair)
        d = _times(((high >> 4) & 0x07F007F0) | (high & -0x7FFF8000), pair)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _E4M3, "=r,=r,=r,=r,r,r,r", [x, y, pair], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )
    return a, b, c, d


@triton.jit
def decode_e4m3(x, pair, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """Words [N, D / 4] and multipliers [N, D / GROUP] -> bf16 [N, D], ordered."""
    a, b, c, d = _e4m3_words(x, pair, N, D, GROUP)
    return _values(a, b, c, d, N, D)


@triton.jit
def _behind(x, tail, N: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr):
    """Words x [N, D / 8] with `tail` [N, TAIL / 8] in the last places."""
    shape: tl.constexpr = [N, D // TAIL, TAIL // 8]
    last = tl.arange(0, D // TAIL)[None, :, None] == D // TAIL - 1
    return tl.reshape(tl.where(last, tl.broadcast_to(tail[:, None, :], shape), tl.reshape(x, shape)), [N, D // 8])


@triton.jit
def decode_e4m3_bf16(x, pair, tail, N: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr):
    """`decode_e4m3` but for the last TAIL columns, which are bf16 already: words [N, TAIL / 2] of two."""
    a, b, c, d = _e4m3_words(x, pair, N, D, GROUP)
    first, second = tl.split(tl.permute(tl.reshape(tail, [N, TAIL // 8, 2, 2]), [0, 1, 3, 2]))  # columns 0-3 and 4-7
    u, w = tl.split(first)
    y, z = tl.split(second)
    factor = tl.full([N, TAIL // 8], 0x3B803B80, tl.int32)  # 2^-8 twice
    a = _behind(a, _times_pair((u & 0xFFFF) | (y << 16), factor), N, D, TAIL)
    b = _behind(b, _times_pair(((u >> 16) & 0xFFFF) | (y & -65536), factor), N, D, TAIL)
    c = _behind(c, _times_pair((w & 0xFFFF) | (z << 16), factor), N, D, TAIL)
    d = _behind(d, _times_pair(((w >> 16) & 0xFFFF) | (z & -65536), factor), N, D, TAIL)
    return _values(a, b, c, d, N, D)


@triton.jit
def decode_e2m1(x, pair, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """Words [N, D / 8] and multipliers [N, D / GROUP] -> bf16 [N, D], ordered."""
    pair = tl.reshape(tl.broadcast_to(pair[:, :, None], [N, D // GROUP, GROUP // 8]), [N, D // 8])
    if INTERPRETED:
        a = _times(((x << 6) & 0x01C001C0) | ((x << 12) & -0x7FFF8000), pair)
        b = _times(((x << 2) & 0x01C001C0) | ((x << 8) & -0x7FFF8000), pair)
        c = _times(((x >> 2) & 0x01C001C0) | ((x << 4) & -0x7FFF8000), pair)
        d = _times(((x >> 6) & 0x01C001C0) | (x & -0x7FFF8000), pair)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r,r", [x, pair], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )
    return _values(a, b, c, d, N, D)
