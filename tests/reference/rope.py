# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: interleaved pairs, optional YaRN, no mscale (facts 4.2)."""

import math

import torch


def frequencies(dim: int, theta: float, yarn: dict | None) -> list[float]:
    """dim/2 angular frequencies; ``yarn`` is the config's rope_scaling or None."""
    freqs = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return freqs
    original = yarn["original_max_position_embeddings"]

    def correction(beta: float) -> float:
        return dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = min(max(math.floor(correction(yarn["beta_fast"])), 0), dim - 1)
    high = min(max(math.ceil(correction(yarn["beta_slow"])), 0), dim - 1)
    width = high - low if high != low else 0.001
    out = []
    for i, f in enumerate(freqs):
        ramp = min(max((i - low) / width, 0.0), 1.0)
        out.append(f / yarn["factor"] * ramp + f * (1 - ramp))
    return out


class Rope:
    """Rotates the last ``dim`` columns of a row by its position."""

    def __init__(self, dim: int, theta: float, yarn: dict | None, device):
        self.dim = dim
        self.freqs = torch.tensor(frequencies(dim, theta, yarn), dtype=torch.float64, device=device)

    def __call__(self, x: torch.Tensor, pos: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """``x`` [T, ..., width], ``pos`` [T] absolute positions; ``inverse`` rotates back."""
        angle = pos.double()[:, None] * self.freqs
        angle = -angle if inverse else angle
        shape = (len(pos), *(1,) * (x.dim() - 2), self.dim // 2)
        cos, sin = angle.cos().view(shape), angle.sin().view(shape)
        kept, turned = x[..., : -self.dim], x[..., -self.dim :]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        return torch.cat([kept, rotated], -1)
