# SPDX-License-Identifier: Apache-2.0
"""Words of index keys as the tensor cores take them; exact.  Importing this module imports Triton.

FP4 keys become bf16 by placing bits: E2M1 s ee m placed as bf16 s 000000ee m000000 is 2^-126 of its value (a subnormal of one is one of the other), times
2^(62 + b - 127) for the E8M0 byte b: the key's 2^-64.  Exact for b <= 192, that is for keys below 2^65.

A register takes nibbles r and 4 + r of a word, which one mask picks: of every eight columns, column 4 h + r comes at 2 r + h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import INTERPRETED

# What the product with a decoded key is to be multiplied by.
FP4_BIAS = tl.constexpr(float(1 << 64))

# A word of eight nibbles ($4) and its scale byte ($5) -> nibbles r and 4 + r, for each r.
_NIBBLES = tl.constexpr("""{
.reg .b32 m, x, y;
mad.lo.u32 m, $5, 0x00800080, 0x1f001f00;
shl.b32 x, $4, 6; shl.b32 y, $4, 12;
and.b32 x, x, 0x01c001c0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $0, x, m;
shl.b32 x, $4, 2; shl.b32 y, $4, 8;
and.b32 x, x, 0x01c001c0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $1, x, m;
shr.u32 x, $4, 2; shl.b32 y, $4, 4;
and.b32 x, x, 0x01c001c0; lop3.b32 x, y, 0x80008000, x, 0xea; mul.rn.bf16x2 $2, x, m;
shr.u32 x, $4, 6;
and.b32 x, x, 0x01c001c0; lop3.b32 x, $4, 0x80008000, x, 0xea; mul.rn.bf16x2 $3, x, m;
}""")


@triton.jit
def fp4_place(column):
    """Where a column comes among the decoded ones."""
    return column // 8 * 8 + column % 4 * 2 + column % 8 // 4


@triton.jit
def _pair(word, factor, R: tl.constexpr):
    """Nibbles R and 4 + R of each word as the bits of two bf16."""
    low, high = (word >> (4 * R)) & 15, (word >> (4 * R + 16)) & 15
    low = ((low & 7) << 22 | (low & 8) << 28).to(tl.float32, bitcast=True) * factor
    high = ((high & 7) << 22 | (high & 8) << 28).to(tl.float32, bitcast=True) * factor
    return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def fp4_keys(word, byte, N: tl.constexpr, DIM: tl.constexpr):
    """Words int32 [N, DIM / 8] of nibbles, the scale byte of each -> bf16 [N, DIM], 2^-64 of the keys, in `fp4_place`'s order."""
    if INTERPRETED:
        factor = ((byte + 62) << 23).to(tl.float32, bitcast=True)
        a, b, c, d = _pair(word, factor, 0), _pair(word, factor, 1), _pair(word, factor, 2), _pair(word, factor, 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _NIBBLES, "=r,=r,=r,=r,r,r", [word, byte], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )
    both = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N, DIM // 2])
    return tl.reshape(tl.join(both.to(tl.int16), (both >> 16).to(tl.int16)), [N, DIM]).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp8_keys(word, N: tl.constexpr, DIM: tl.constexpr):
    """Words int32 [N, DIM / 4] of four E4M3 each -> E4M3 [N, DIM]."""
    word = tl.broadcast_to(word[:, :, None], [N, DIM // 4, 4])
    if INTERPRETED:
        byte = (word >> (8 * tl.arange(0, 4))[None, None]).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:  # four bytes of a register, which holds them already
        byte = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [word], dtype=tl.float8e4nv, is_pure=True, pack=4)
    return tl.reshape(byte, [N, DIM])
