# SPDX-License-Identifier: Apache-2.0
"""Parameters in the checkpoint's own formats, and how a tensor parallel rank cuts them."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.linear import fp8_linear
from .settings import Settings


def raw(shape: tuple[int, ...], dtype: torch.dtype, shard_dim: int | None = None) -> nn.Parameter:
    """An uninitialised, frozen parameter; `shard_dim` is the axis a rank holds its part of."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    parameter.shard_dim = shard_dim
    return parameter


class Fp8Linear(nn.Module):
    """`weight` E4M3 [out, in] and `scale` E8M0 bytes [out/32, in/32]; this rank's part of them."""

    def __init__(self, out_features: int, in_features: int, settings: Settings,
                 shard_dim: int | None = None):
        super().__init__()
        size = [out_features, in_features]
        if shard_dim is not None:
            size[shard_dim] //= settings.shards.size
        self.weight = raw(tuple(size), torch.float8_e4m3fn, shard_dim)
        self.scale = raw((-(-size[0] // 32), -(-size[1] // 32)), torch.uint8, shard_dim)
        self.quantize = settings.activation_quant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        return fp8_linear(x, self.weight, self.scale, self.quantize)


class Plain(nn.Module):
    """`weight` in bf16 [out, in], used in the caller's dtype."""

    def __init__(self, out_features: int, in_features: int):
        super().__init__()
        self.weight = raw((out_features, in_features), torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in x's dtype."""
        return nn.functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x rms(x) weight: float32 (or wider) inside, `dtype` out."""

    def __init__(self, dim: int, eps: float, settings: Settings):
        super().__init__()
        self.weight = raw((dim,), torch.bfloat16)
        self.eps, self.dtype, self.accumulator = eps, settings.dtype, settings.accumulator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] of any float dtype -> the same shape in the activations' dtype."""
        x = x.to(self.accumulator)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * self.weight.to(x.dtype)).to(self.dtype)
