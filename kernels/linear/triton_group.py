# SPDX-License-Identifier: Apache-2.0
"""wo_a: each group's own Linear of bf16 rows over E4M3 weights under 32 x 32 scales, at the speed of memory for few rows.

The weights come as `pack_group`'s words.  Byte p of 32 consecutive words is one scale block, so four products of 32 columns each
make a step of 128, each scaled as it is added: words go from shared memory to registers, where a byte becomes bf16 (exact), the tensor cores' A.
Splits and their sum are those of `triton_skinny`, so a row's bits depend neither on T nor on other rows.  Importing this imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.blocks import dense_weight
from .group_weight import COLUMNS
from ..triton_rounding import INTERPRETED
from .triton_skinny import MOST_ROWS, Config, arrivals_of, finish, gather, leave, splits_for

# By rows at most; more take several tiles of the last. Registers and shared memory leave room for four, three and two programs an SM.
# Without its limit the compiler takes 183 registers at 128 x 64, and one program an SM.
CONFIGS = {16: Config(64, 16, 4, 5), 32: Config(64, 32, 4, 5), 64: Config(128, 64, 8, 3, 128)}
INVARIANT = CONFIGS[64]


def kernel_takes(weight: torch.Tensor, groups: int) -> bool:
    """Whether the kernel can: packed words, and groups of whole tiles (128 of their outputs)."""
    return weight.dtype == torch.int32 and weight.shape[0] % (128 * groups) == 0


def group_product(o: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, config: Config) -> torch.Tensor:
    """`reference.group_linear` for any T: o bf16 [T, G, K], words int32 [G*R, K/4], scale uint8 [G*R/32, K/32] -> bf16 [T, G, R]."""
    rows, groups, depth = o.shape
    outputs = words.shape[0]
    if words.shape[1] * 4 != depth or not kernel_takes(words, groups):
        raise ValueError(f"o has {groups} groups of {depth} columns, the weight is {list(words.shape)}: give pack_group's words [G*R, K/4], R a multiple of 128")
    o = o if o.stride(2) == 1 and o.stride(1) == depth else o.contiguous()
    out = torch.empty(rows, groups, outputs // groups, dtype=o.dtype, device=o.device)
    splits = splits_for(outputs, depth // COLUMNS)
    for first in range(0, rows, MOST_ROWS):
        part = o[first : first + MOST_ROWS]
        tiles = (triton.cdiv(len(part), config.bn), outputs // config.bm)
        count = tiles[0] * tiles[1]
        sums = torch.empty(splits * count * config.bm * config.bn if splits > 1 else 0, dtype=torch.float32, device=o.device)
        _group[(*tiles, splits)](
            part, part.stride(0) if rows > 1 else groups * depth, words, scale.view(torch.int32), out[first:], sums,
            arrivals_of(words) if splits > 1 else sums, len(part), outputs, outputs // groups, depth,
            BM=config.bm, BN=config.bn, SPLITS=splits, num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
        )
    return out


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 [o, K] of packed words, in one launch, or of E4M3 as it is."""
    if weight.dtype != torch.int32:
        return dense_weight(weight, scale, torch.bfloat16)
    outputs, depth = weight.shape[0], 4 * weight.shape[1]
    out = torch.empty(outputs, depth, dtype=torch.bfloat16, device=weight.device)
    _dequantize[(depth // COLUMNS, outputs // 32)](weight, scale.view(torch.int32), out, depth, num_warps=4)
    return out


@triton.jit
def _value(word, P: tl.constexpr):
    """Byte P of int32 words, an E4M3 value, as bf16 (exact).

    s eeee mmm lands on bf16's sign, low exponent and high mantissa bits, which is the value times 2^-120, subnormals too.
    """
    if INTERPRETED:  # in float32, as the interpreter multiplies bf16 as integers
        bits = (((word >> (8 * P)) & 0x80) << 24) | (((word >> (8 * P)) & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 2.0**120).to(tl.bfloat16)
    # Byte P of two words, each twice in a half; the lower copy falls to the mask. 0x7B80 is 2^120, and -0 adds nothing.
    SELECT: tl.constexpr = "0x4400" if P == 0 else ("0x5511" if P == 1 else ("0x6622" if P == 2 else "0x7733"))
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, z; prmt.b32 a, $1, $2, " + SELECT + "; shr.b32 b, a, 4; and.b32 b, b, 0x07F007F0; "
        "lop3.b32 a, a, 0x80008000, b, 0xEA; mov.b32 c, 0x7B807B80; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, a, c, z; }",
        "=r,r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2,
    )


@triton.jit
def _power(scale, P: tl.constexpr):
    """Scale byte P of int32 words in float32; 2^-127 becomes 0."""
    return (((scale >> (8 * P)) & 0xFF) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _group(
    o, o_stride, words, scales, out, sums, arrivals, rows, outputs, group, depth,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):
    """Grid (row tiles, weight tiles, SPLITS); o [rows, G, depth], words [outputs, depth/4], scales int32 [outputs/32, depth/128]."""
    tile_n, tile_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, 32)
    m, n = tile_m * BM + i, tile_n * BN + j
    steps = depth // 128
    first, last = split * steps // SPLITS, (split + 1) * steps // SPLITS

    w_here = words + m.to(tl.int64)[:, None] * (depth // 4) + (first * 32 + k)[None, :]
    o_here = o + (tile_m * BM // group) * depth + n.to(tl.int64)[None, :] * o_stride + (first * 128 + k)[:, None]
    real = (n < rows)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    block = i // 32
    # A step's scales are loaded a step ahead: one word for each 32 rows.
    block0 = scales + tile_m * (BM // 32) * steps
    block1 = block0 + steps
    block2 = block0 + (2 if BM > 64 else 0) * steps
    block3 = block0 + (3 if BM > 64 else 0) * steps
    s0, s1, s2, s3 = tl.load(block0 + first), tl.load(block1 + first), tl.load(block2 + first), tl.load(block3 + first)
    for step in range(first, last):
        word = tl.load(w_here)
        ahead = tl.minimum(step + 1, last - 1)
        n0, n1, n2, n3 = tl.load(block0 + ahead), tl.load(block1 + ahead), tl.load(block2 + ahead), tl.load(block3 + ahead)
        scale = tl.where(block < 2, tl.where(block == 0, s0, s1), tl.where(block == 2, s2, s3))
        for P in tl.static_range(4):
            x = tl.load(o_here + 32 * P, mask=real, other=0.0)
            w = _value(word, P)
            if INTERPRETED:
                w, x = w.to(tl.float32), x.to(tl.float32)
            acc += tl.dot(w, x) * _power(scale, P)[:, None]
        s0, s1, s2, s3 = n0, n1, n2, n3
        w_here += 32
        o_here += 128

    if SPLITS == 1:
        finish(acc, None, None, out, m, n, rows, outputs)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tile = tile_m * tl.num_programs(0) + tile_n
        if leave(acc, sums, arrivals, tile, tiles, split, SPLITS):
            finish(gather(sums, tile, tiles, BM, BN, SPLITS), None, None, out, m, n, rows, outputs)
            tl.store(arrivals + tile, 0)


@triton.jit
def _dequantize(words, scales, out, depth):
    """Grid (128 columns, 32 rows)."""
    column, block = tl.program_id(0), tl.program_id(1)
    i, k = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    row = (block * 32 + i).to(tl.int64)
    word = tl.load(words + row * (depth // 4) + column * 32 + k)
    s = tl.load(scales + block * (depth // 128) + column)
    for P in tl.static_range(4):
        value = _value(word, P).to(tl.float32) * _power(s, P)
        tl.store(out + row * depth + column * 128 + 32 * P + k, value.to(tl.bfloat16))
