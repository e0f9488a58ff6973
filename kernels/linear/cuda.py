# SPDX-License-Identifier: Apache-2.0
"""Dense Linears on a GPU: a Triton kernel at the speed of memory for few rows, a library's product for many.

In the batch-invariant mode the Triton kernels run for any T, in one configuration.  Importing this module imports Triton.
"""

from __future__ import annotations

import torch

from .. import invariant
from ..formats.rowfp8 import RowFp8
from . import reference, triton_group
from .row_weight import RowWeight
from .triton_group import dequantized, group_product, kernel_takes
from .triton_skinny import INVARIANT, Config, config_for, row_product, wide_product

# Up to so many rows the Triton kernel runs.
ROW_SKINNY = 128
WIDE_SKINNY = 64
GROUP_SKINNY = 256
# Whether the library may keep FP8 sums in the tensor cores' own few bits.
FAST_ACCUM = False


def row_linear(
    x: RowFp8, weight: RowWeight, out_dtype: torch.dtype = torch.bfloat16, config: Config | None = None,
) -> torch.Tensor:
    """`reference.row_linear`; `config` forces the Triton kernel with it. The library makes bf16 of multiples of 16 only."""
    if out_dtype == torch.float64:
        return reference.row_linear(x, weight, out_dtype)
    rows, (outputs, depth) = len(x.q), weight.q.shape
    if config is None and invariant.enabled():
        config = INVARIANT
    if config is None and rows > ROW_SKINNY and out_dtype == torch.bfloat16 and outputs % 16 == depth % 16 == 0:
        return torch._scaled_mm(
            x.q, weight.q.t(), scale_a=x.scale[:, None], scale_b=weight.scale[None, :], out_dtype=out_dtype, use_fast_accum=FAST_ACCUM,
        )
    return row_product(x, weight, out_dtype, config or config_for(rows))


def wide_linear(x: torch.Tensor, weight: torch.Tensor, config: Config | None = None) -> torch.Tensor:
    """`reference.wide_linear`, which also runs here for other dtypes than bf16; `config` forces the Triton kernel with it."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return reference.wide_linear(x, weight)
    if config is None and invariant.enabled():
        config = INVARIANT
    if config is None and len(x) > WIDE_SKINNY:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return wide_product(x, weight, config or config_for(len(x)))


def group_linear(o: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, config: Config | None = None) -> torch.Tensor:
    """`reference.group_linear`; `config` forces the Triton kernel with it, which takes `pack_group`'s words only."""
    if o.dtype != torch.bfloat16:
        return reference.group_linear(o, weight, scale)
    rows, groups, _ = o.shape
    takes = kernel_takes(weight, groups)
    if config is None and invariant.enabled():
        if not takes:
            return reference.group_linear(o, weight, scale)
        config = triton_group.INVARIANT
    if config is None and (rows > GROUP_SKINNY or not takes):
        out = torch.empty(rows, groups, weight.shape[0] // groups, dtype=o.dtype, device=o.device)
        w = dequantized(weight, scale).unflatten(0, (groups, -1))
        torch.bmm(o.transpose(0, 1), w.transpose(1, 2), out=out.transpose(0, 1))
        return out
    return group_product(o, weight, scale, config or config_for(rows, triton_group.CONFIGS))
