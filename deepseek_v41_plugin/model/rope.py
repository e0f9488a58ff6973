# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding on the last dims, in interleaved pairs.  (v41-facts 4.2)"""

from __future__ import annotations

import math

import torch

from ..config import ModelConfig


def frequencies(cfg: ModelConfig, compressed: bool) -> torch.Tensor:
    """float64 [rope/2] radians a position: plain for ratio 0, YaRN on compress_rope_theta else."""
    dim = cfg.qk_rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if not compressed:
        return freq
    yarn = cfg.rope_scaling

    def correction(beta: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return freq / yarn.factor * ramp + freq * (1 - ramp)


class Rope:
    """Rotation by position * frequency of the last `2 * len(frequencies)` dims."""

    def __init__(self, freq: torch.Tensor):
        self.freq = freq

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """x [T, ..., d], positions int64 [T] -> rotated copy in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.freq.device != x.device:
            self.freq = self.freq.to(x.device)
        angle = positions.double()[:, None] * self.freq
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        if inverse:
            sin = -sin
        shape = (x.shape[0], *[1] * (x.dim() - 2), -1)
        cos, sin = cos.view(shape), sin.view(shape)
        dim = 2 * self.freq.shape[0]
        even, odd = x[..., -dim::2].to(wide), x[..., -dim + 1 :: 2].to(wide)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((x[..., :-dim], turned.to(x.dtype)), -1)
