# SPDX-License-Identifier: Apache-2.0
"""FP8 rows in one launch: quantised, behind an RMSNorm, or behind SwiGLU.

A program holds whole rows in registers and reads them once.  What a program does depends on the row's length only, so
these run in the batch-invariant mode too.  Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.rowfp8 import RowFp8
from . import reference
from ..triton_rounding import to_bf16, to_e4m3

# The longest row: 64 values a thread of 8 warps.
LONGEST = 16384


def quantize_rows(x: torch.Tensor) -> RowFp8:
    """`reference.quantize_rows` of bf16 or float32 rows, bit for bit; float64 runs there."""
    if x.dtype == torch.float64 or x.shape[1] > LONGEST:
        return reference.quantize_rows(x)
    x, out = _rows_of(x), _empty(x, x.shape[1])
    if len(x):
        grid, options = _launch(len(x), x.shape[1])
        _quantize[grid](x, _stride(x), *out, len(x), x.shape[1], **options)
    return out


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, value: bool = True) -> tuple[torch.Tensor | None, RowFp8]:
    """`reference.norm_rows`; sums in another order, so y may be its neighbour in bf16. The FP8 rows are exactly y's."""
    if x.dtype == torch.float64 or x.shape[1] > LONGEST:
        return reference.norm_rows(x, weight, eps, value)
    x, out = _rows_of(x), _empty(x, x.shape[1])
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if value else None
    if len(x):
        grid, options = _launch(len(x), x.shape[1])
        _norm[grid](x, _stride(x), weight, y, *out, len(x), x.shape[1], float(eps), VALUE=value, **options)
    return y, out


def swiglu_rows(gate_up: torch.Tensor, limit: float) -> RowFp8:
    """`reference.swiglu_rows`; its exponential is another one, so a value may be the neighbour in bf16 before it is quantised."""
    inner = gate_up.shape[1] // 2
    if gate_up.dtype == torch.float64 or inner > LONGEST:
        return reference.swiglu_rows(gate_up, limit)
    gate_up, out = _rows_of(gate_up), _empty(gate_up, inner)
    if len(gate_up):
        grid, options = _launch(len(gate_up), inner)
        _swiglu[grid](gate_up, _stride(gate_up), *out, len(gate_up), inner, float(limit), **options)
    return out


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _stride(x: torch.Tensor) -> int:
    """Between rows; of one row torch may say anything, and another kernel would be compiled for it."""
    return x.stride(0) if len(x) > 1 else x.shape[1]


def _empty(x: torch.Tensor, columns: int) -> RowFp8:
    return RowFp8(
        torch.empty(len(x), columns, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(len(x), dtype=torch.float32, device=x.device),
    )


def _launch(rows: int, columns: int) -> tuple[tuple[int], dict]:
    """About 2048 values a program or more, by the columns alone."""
    block = triton.next_power_of_2(max(columns, 16))
    held = max(2048 // block, 1)
    return (triton.cdiv(rows, held),), {"ROWS": held, "BLOCK": block, "num_warps": 4 if block <= 4096 else 8}


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(row int64 [ROWS, 1], column [1, BLOCK], mask)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _write(y, q, scale, row, column, mask, rows, columns):
    """y float32 -> q [rows, columns] and scale [rows]; y is 0 outside the mask.

    With a = (1 + f) 2^E and 448 = 1.75 * 2^8: ceil(log2(a / 448)) = E - 8, one more where 1 + f > 1.75, which carries.
    """
    largest = tl.maximum(tl.max(tl.abs(y), 1, keep_dims=True), 1e-4)
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8  # biased by 127
    # float32's infinities and NaN have no E4M3 row; the clamp keeps their bits floats.
    exponent = tl.minimum(exponent, 246)
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(q + row * columns + column, to_e4m3(y * power), mask=mask)
    tl.store(scale + row, (exponent << 23).to(tl.float32, bitcast=True), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _quantize(x, x_stride, q, scale, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _place(rows, columns, ROWS, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    _write(value, q, scale, row, column, mask, rows, columns)


@triton.jit(do_not_specialize=["rows"])
def _norm(x, x_stride, weight, y, q, scale, rows, columns, eps, VALUE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _place(rows, columns, ROWS, BLOCK)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 1, keep_dims=True) / columns
    rounded = to_bf16(value * tl.rsqrt(mean + eps) * w)
    if VALUE:
        tl.store(y + row * columns + column, rounded, mask=mask)
    # A row beyond the last is 0 * rsqrt(1e-20), still 0.
    _write(rounded.to(tl.float32), q, scale, row, column, mask, rows, columns)


@triton.jit(do_not_specialize=["rows"])
def _swiglu(x, x_stride, q, scale, rows, columns, limit, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _place(rows, columns, ROWS, BLOCK)
    here = x + row * x_stride + column
    gate = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(here + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    value = to_bf16(gate / (1 + tl.exp(-gate)) * up)
    _write(value.to(tl.float32), q, scale, row, column, mask, rows, columns)
