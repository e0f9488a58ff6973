# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding on the last dims, in interleaved pairs.  (v41-facts 4.2)"""

from __future__ import annotations

import torch

from ..invariant import over_rows


def rope(x: torch.Tensor, positions: torch.Tensor, freq: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """The last 2 n dims of x [T, ..., d] turned by positions int64 [T] times freq float64 [n] -> a copy in x's dtype.

    Angles are float64, their cosines and sines float32 or x's dtype if wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = over_rows(lambda angle: (angle.cos().to(wide), angle.sin().to(wide)), positions.double()[:, None] * freq)
    if inverse:
        sin = -sin
    shape = (x.shape[0], *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    dim = 2 * freq.shape[0]
    even, odd = x[..., -dim::2].to(wide), x[..., -dim + 1 :: 2].to(wide)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-dim], turned.to(x.dtype)), -1)
