# SPDX-License-Identifier: Apache-2.0
"""FP8 activations under one power of two a row: what the tensor cores take, scaled behind the product."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .scalar import E4M3_MAX, ceil_log2, e4m3, pow2, widened


class RowFp8(NamedTuple):
    """Values q * scale: q E4M3 [T, K], scale float32 [T], a power of two.

    The model rounds to FP8 per 32 columns (v41-facts 2.1).  Scales are powers of two in both, so the values are
    the same down to 2^-13.8 of the row's largest; below, where E4M3 has no more exponents, they differ by 2^-17.2 of it at most.
    """

    q: torch.Tensor
    scale: torch.Tensor

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """[T, K] in `dtype`; exact in bf16 and wider."""
        return self.q.to(dtype) * self.scale.to(dtype)[:, None]


def row_quantize(x: torch.Tensor) -> RowFp8:
    """x [T, K] -> FP8 rows: scale = 2^ceil(log2(max(max|x|, 1e-4) / 448))."""
    x = widened(x)
    exponent = ceil_log2(x.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX)
    return RowFp8(e4m3(x * pow2(-exponent, x.dtype)[:, None]), pow2(exponent, torch.float32))
