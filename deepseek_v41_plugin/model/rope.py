# SPDX-License-Identifier: Apache-2.0
"""The frequencies of the rotary embedding, which `kernels.rope` turns by.  (v41-facts 4.2)"""

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
