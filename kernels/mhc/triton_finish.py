# SPDX-License-Identifier: Apache-2.0
"""The second launch of `enter` and `turn`: partial sums to mixes, the collapsed row to its norm and its FP8 form.

Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.rowfp8 import RowFp8
from ..latent.triton_codes import e4m3_bytes, fp8_exponent, reciprocal
from ..triton_rounding import power_of_two, to_bf16
from .weights import Entered, MixerWeights

COLUMNS = 32  # 24 products, the sum of squares, and room
GROUP = 8  # chunks that are added before the groups are: part of the order of the sums
WARPS = 4


def finish(
    collapsed: torch.Tensor, partial: torch.Tensor,
    mixer: MixerWeights, norm_weight: torch.Tensor, norm_eps: float, quantize: bool, grouped: bool,
) -> Entered:
    """collapsed int16 [2, T, D]: the upper and lower halves of float32; partial float32 [T, chunks, COLUMNS], or
    grouped [groups of GROUP chunks, COLUMNS, T]."""
    _, rows, dim = collapsed.shape
    device = collapsed.device
    x = torch.empty(rows, dim, dtype=torch.bfloat16, device=device)
    q = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=device) if quantize else None
    scale = torch.empty(rows, dtype=torch.float32, device=device) if quantize else None
    pre, post = (torch.empty(rows, 4, dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty(rows, 4, 4, dtype=torch.float32, device=device)
    if rows:
        together = 32 * WARPS if grouped else 1
        mixing = triton.cdiv(rows, together)
        _finish[(mixing + rows,)](
            collapsed, norm_weight, float(norm_eps), x, q.view(torch.uint8) if quantize else None, scale,
            partial, mixer.base, mixer.scale, pre, post, comb,
            rows, mixing, mixer.iterations, float(mixer.mix_eps), float(mixer.norm_eps),
            D=dim, BLOCK=triton.next_power_of_2(dim), SUMS=partial.numel() // (rows * COLUMNS), PER=1 if grouped else GROUP,
            TOGETHER=together, QUANTIZE=quantize, num_warps=WARPS,
        )
    return Entered(x, RowFp8(q, scale) if quantize else None, pre, post, comb)


@triton.jit(do_not_specialize=["rows", "mixing", "iterations"])
def _finish(
    collapsed, norm_weight, norm_eps, x, q, q_scale, partial, base, scale, pre, post, comb,
    rows, mixing, iterations, mix_eps, mix_norm_eps,
    D: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, PER: tl.constexpr, TOGETHER: tl.constexpr, QUANTIZE: tl.constexpr,
):
    """The first `mixing` programs make the mixes of TOGETHER rows each, the others the norm of a row each."""
    program = tl.program_id(0)
    if program < mixing:
        if TOGETHER == 1:
            t = program.to(tl.int64)
            real = program < rows
            column = tl.arange(0, 32)
            sums = _total(partial + t * (SUMS * 32) + column, column < 25, 32, SUMS, PER)
        else:
            t = program.to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
            real = t < rows
            sums = t
        _mixes(sums, partial + t, t, real, rows.to(tl.int64), base, scale, pre, post, comb,
               iterations, mix_eps, mix_norm_eps, D, SUMS, PER, TOGETHER)
    else:
        _norm(program - mixing, rows, collapsed, norm_weight, norm_eps, x, q, q_scale, D, BLOCK, QUANTIZE)


@triton.jit
def _norm(row, rows, collapsed, norm_weight, norm_eps, x, q, q_scale, D: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr):
    """RMSNorm of a row in float32, rounded to bf16; that under one power of two in E4M3."""
    d = tl.arange(0, BLOCK)
    mask = d < D
    begin = row.to(tl.int64) * D
    upper = tl.load(collapsed + begin + d, mask=mask, other=0).to(tl.int32)
    lower = tl.load(collapsed + rows.to(tl.int64) * D + begin + d, mask=mask, other=0).to(tl.int32)
    c = ((upper << 16) | (lower & 0xFFFF)).to(tl.float32, bitcast=True)
    w = tl.load(norm_weight + d, mask=mask, other=0.0).to(tl.float32)
    c = to_bf16(c * tl.rsqrt(tl.sum(c * c, 0) / D + norm_eps) * w)
    tl.store(x + begin + d, c, mask=mask)
    if QUANTIZE:
        wide = c.to(tl.float32)
        exponent = fp8_exponent(tl.maximum(tl.max(tl.abs(wide), 0), 1e-4))
        tl.store(q + begin + d, e4m3_bytes(wide * power_of_two(-exponent)), mask=mask)
        tl.store(q_scale + row, power_of_two(exponent))


@triton.jit
def _total(at, mask, sum_stride, SUMS: tl.constexpr, PER: tl.constexpr):
    """The sum of SUMS partial sums: PER of them in order, then these in order."""
    total = 0.0
    for first in tl.static_range(0, SUMS, PER):
        group = 0.0
        for s in tl.static_range(PER):
            if first + s < SUMS:
                group += tl.load(at + (first + s) * sum_stride, mask=mask, other=0.0)
        total += group
    return total


@triton.jit
def _column(sums, at, real, step, K: tl.constexpr, SUMS: tl.constexpr, PER: tl.constexpr, TOGETHER: tl.constexpr):
    """Column K of the sums: of one row a scalar; of TOGETHER rows a lane each, with `step` between columns."""
    if TOGETHER == 1:
        return tl.sum(tl.where(tl.arange(0, 32) == K, sums, 0.0), 0)
    else:
        return _total(at + K * step, real, 32 * step, SUMS, PER)


@triton.jit
def _divide(a, b, c, d, eps):
    """Four values over their sum."""
    share = reciprocal((a + b) + (c + d) + eps)
    return a * share, b * share, c * share, d * share


@triton.jit
def _softmax(a, b, c, d, eps):
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    share = reciprocal((a + b) + (c + d))
    return a * share + eps, b * share + eps, c * share + eps, d * share + eps


@triton.jit
def _mixes(
    sums, at, t, real, step, base, scale, pre, post, comb, iterations, mix_eps, norm_eps,
    D: tl.constexpr, SUMS: tl.constexpr, PER: tl.constexpr, TOGETHER: tl.constexpr,
):
    """`reference.mixes` behind its product; the 16 values of comb lie in 16 registers."""
    rms = tl.rsqrt(_column(sums, at, real, step, 24, SUMS, PER, TOGETHER) / (4 * D) + norm_eps)
    to_pre, to_post, to_comb = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    for k in tl.static_range(4):
        m = _column(sums, at, real, step, k, SUMS, PER, TOGETHER) * rms
        tl.store(pre + t * 4 + k, tl.sigmoid(m * to_pre + tl.load(base + k)) + mix_eps, mask=real)
    for k in tl.static_range(4):
        m = _column(sums, at, real, step, 4 + k, SUMS, PER, TOGETHER) * rms
        tl.store(post + t * 4 + k, 2 * tl.sigmoid(m * to_post + tl.load(base + 4 + k)), mask=real)
    a0 = _column(sums, at, real, step, 8, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 8)
    a1 = _column(sums, at, real, step, 9, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 9)
    a2 = _column(sums, at, real, step, 10, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 10)
    a3 = _column(sums, at, real, step, 11, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 11)
    b0 = _column(sums, at, real, step, 12, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 12)
    b1 = _column(sums, at, real, step, 13, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 13)
    b2 = _column(sums, at, real, step, 14, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 14)
    b3 = _column(sums, at, real, step, 15, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 15)
    c0 = _column(sums, at, real, step, 16, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 16)
    c1 = _column(sums, at, real, step, 17, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 17)
    c2 = _column(sums, at, real, step, 18, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 18)
    c3 = _column(sums, at, real, step, 19, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 19)
    d0 = _column(sums, at, real, step, 20, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 20)
    d1 = _column(sums, at, real, step, 21, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 21)
    d2 = _column(sums, at, real, step, 22, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 22)
    d3 = _column(sums, at, real, step, 23, SUMS, PER, TOGETHER) * rms * to_comb + tl.load(base + 23)
    a0, a1, a2, a3 = _softmax(a0, a1, a2, a3, mix_eps)
    b0, b1, b2, b3 = _softmax(b0, b1, b2, b3, mix_eps)
    c0, c1, c2, c3 = _softmax(c0, c1, c2, c3, mix_eps)
    d0, d1, d2, d3 = _softmax(d0, d1, d2, d3, mix_eps)
    for i in range(iterations):
        if i > 0:
            a0, a1, a2, a3 = _divide(a0, a1, a2, a3, mix_eps)
            b0, b1, b2, b3 = _divide(b0, b1, b2, b3, mix_eps)
            c0, c1, c2, c3 = _divide(c0, c1, c2, c3, mix_eps)
            d0, d1, d2, d3 = _divide(d0, d1, d2, d3, mix_eps)
        a0, b0, c0, d0 = _divide(a0, b0, c0, d0, mix_eps)
        a1, b1, c1, d1 = _divide(a1, b1, c1, d1, mix_eps)
        a2, b2, c2, d2 = _divide(a2, b2, c2, d2, mix_eps)
        a3, b3, c3, d3 = _divide(a3, b3, c3, d3, mix_eps)
    comb += t * 16
    tl.store(comb, a0, mask=real)
    tl.store(comb + 1, a1, mask=real)
    tl.store(comb + 2, a2, mask=real)
    tl.store(comb + 3, a3, mask=real)
    tl.store(comb + 4, b0, mask=real)
    tl.store(comb + 5, b1, mask=real)
    tl.store(comb + 6, b2, mask=real)
    tl.store(comb + 7, b3, mask=real)
    tl.store(comb + 8, c0, mask=real)
    tl.store(comb + 9, c1, mask=real)
    tl.store(comb + 10, c2, mask=real)
    tl.store(comb + 11, c3, mask=real)
    tl.store(comb + 12, d0, mask=real)
    tl.store(comb + 13, d1, mask=real)
    tl.store(comb + 14, d2, mask=real)
    tl.store(comb + 15, d3, mask=real)
