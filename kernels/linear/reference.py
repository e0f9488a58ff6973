# SPDX-License-Identifier: Apache-2.0
"""The plain forms of the dense Linears and of the rows they take."""

from __future__ import annotations

import torch

from ..formats.blocks import dense_weight, round_fp8
from ..formats.rowfp8 import RowFp8, row_quantize
from ..formats.scalar import widened
from ..invariant import linear, over_rows, row_op
from ..norm import rms_norm
from .group_weight import unpack_group
from .row_weight import RowWeight


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, quantize: bool = True) -> torch.Tensor:
    """y = Q(x) W^T: x [T, i], weight E4M3 [o, i], scale E8M0 bytes [ceil(o/32), ceil(i/32)] -> [T, o].

    Q rounds x to FP8 per row and 32 columns; `quantize=False` leaves x as it is.  The product is in
    x's dtype (bf16 with float32 accumulation, float32 or float64); both operands are exact in bf16.
    """
    return linear(round_fp8(x) if quantize else x, dense_weight(weight, scale, x.dtype))


def quantize_rows(x: torch.Tensor) -> RowFp8:
    """x [T, K] -> FP8 under one power of two a row (`formats.rowfp8`)."""
    return row_quantize(x)


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, value: bool = True) -> tuple[torch.Tensor | None, RowFp8]:
    """RMSNorm: x [T, K], weight bf16 [K] -> (y = x rms(x) weight in bf16 or None without `value`, y's FP8 rows).

    float32 inside; y is rounded to bf16 before it is quantised.  float64 stays float64 throughout.
    """
    y = _rounded(rms_norm(x, weight, eps))
    return y if value else None, row_quantize(y)


def swiglu_rows(gate_up: torch.Tensor, limit: float) -> RowFp8:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): gate_up [T, 2F], the gate first -> FP8 rows [T, F].

    float32 inside, rounded to bf16 before it is quantised.  float64 stays float64 throughout.
    """
    return row_quantize(_rounded(_swiglu(widened(gate_up), limit)))


def row_linear(x: RowFp8, weight: RowWeight, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """y = x W^T of values under one power of two a row: x [T, i], weight [o, i] -> [T, o] in `out_dtype`.

    Sums in float32, or in float64 for float64 results.
    """
    wide = torch.promote_types(out_dtype, torch.float32)
    y = linear(x.q.to(wide), weight.q.to(wide))
    return (y * x.scale.to(wide)[:, None] * weight.scale.to(wide)).to(out_dtype)


def group_linear(o: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each group's own Linear: o [T, G, K], weight E4M3 [G*R, K], scale E8M0 bytes [G*R/32, K/32] -> [T, G, R] in o's dtype.

    o is not quantised; the weights are exact in bf16.  weight may be the int32 words of `pack_group`.
    """
    weight = unpack_group(weight) if weight.dtype == torch.int32 else weight
    w = dense_weight(weight, scale, o.dtype).unflatten(0, (o.shape[1], -1))
    return over_rows(lambda x: torch.einsum("tgi,gri->tgr", x, w), o, apart=True)


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with the sums' own bits: x [T, K], weight [o, K], both bf16 -> float32 [T, o] (float64 for float64)."""
    wide = widened(x)
    return linear(wide, weight.to(wide.dtype))


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.bfloat16()


@row_op(1, apart=True)
def _swiglu(x: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
