# SPDX-License-Identifier: Apache-2.0
"""Dense Linears over E4M3 weights with 32 x 32 E8M0 scales, and the rows they take."""

from functools import cache

import torch

from ..formats.rowfp8 import RowFp8
from ..registry import op, triton, with_triton
from . import reference
from .group_weight import pack_group
from .row_weight import RowWeight, row_weight


@cache
def _with_fp8(device: torch.device) -> tuple[bool, str]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return False, "FP8 tensor cores begin with SM89"
    return with_triton(device)


fp8_linear = op("fp8_linear", reference.fp8_linear)
quantize_rows = op("quantize_rows", reference.quantize_rows, triton(__name__ + ".triton_rows", "quantize_rows", _with_fp8))
norm_rows = op("norm_rows", reference.norm_rows, triton(__name__ + ".triton_rows", "norm_rows", _with_fp8))
swiglu_rows = op("swiglu_rows", reference.swiglu_rows, triton(__name__ + ".triton_rows", "swiglu_rows", _with_fp8))
group_linear = op("group_linear", reference.group_linear, triton(__name__ + ".cuda", "group_linear", _with_fp8))
wide_linear = op("wide_linear", reference.wide_linear, triton(__name__ + ".cuda", "wide_linear", _with_fp8))
row_linear_op = op("row_linear", reference.row_linear, triton(__name__ + ".cuda", "row_linear", _with_fp8))


def row_linear(x: RowFp8, weight: RowWeight, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`reference.row_linear` by the implementation for x's device, which the registry does not find inside a tuple."""
    return row_linear_op.choose(x.q.device).fn(x, weight, out_dtype)


__all__ = [
    "RowWeight", "fp8_linear", "group_linear", "norm_rows", "pack_group", "quantize_rows", "row_linear", "row_linear_op", "row_weight", "swiglu_rows",
    "wide_linear",
]
