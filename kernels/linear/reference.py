# SPDX-License-Identifier: Apache-2.0
"""The plain form of the FP8 Linear."""

from __future__ import annotations

import torch

from ..formats.blocks import dense_weight, round_fp8


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, quantize: bool = True) -> torch.Tensor:
    """y = Q(x) W^T: x [T, i], weight E4M3 [o, i], scale E8M0 bytes [ceil(o/32), ceil(i/32)] -> [T, o].

    Q rounds x to FP8 per row and 32 columns; `quantize=False` leaves x as it is.  The product is in
    x's dtype (bf16 with float32 accumulation, float32 or float64); both operands are exact in bf16.
    """
    return torch.nn.functional.linear(round_fp8(x) if quantize else x, dense_weight(weight, scale, x.dtype))
