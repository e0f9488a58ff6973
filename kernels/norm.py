# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in plain torch.  (v41-facts 3)"""

from __future__ import annotations

import torch

from .formats.scalar import widened
from .invariant import over_rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x rms(x) weight: x [..., K], weight [K] -> the same shape in float32, or x's dtype if that is wider."""
    x = widened(x)
    x = x * torch.rsqrt(over_rows(mean_square, x) + eps)
    return x * weight.to(x.dtype)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Over the last dim, which is kept as 1."""
    return x.square().mean(-1, keepdim=True)
