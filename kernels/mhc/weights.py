# SPDX-License-Identifier: Apache-2.0
"""What a sublayer's mHC is given and gives."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..formats.rowfp8 import RowFp8


class MixerWeights(NamedTuple):
    """fn [2c + c*c, c*D], base [2c + c*c], scale [3], all float32, and the constants of `mixes`.

    `parts` is `prepare(fn)`, which the tensor cores take; without it a kernel splits fn in each call.
    """

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    iterations: int
    mix_eps: float
    norm_eps: float
    parts: torch.Tensor | None = None


class Entered(NamedTuple):
    """A sublayer's input x [T, D] in the stream's dtype, the same in FP8 rows (None where no kernel makes them),
    and its mixes in the accumulator's dtype: pre [T, c] for the NEXT sublayer, post [T, c] and comb [T, c, c] for this one."""

    x: torch.Tensor
    fp8: RowFp8 | None
    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


CHUNK = 32  # columns of a copy in one tile


def prepare(fn: torch.Tensor) -> torch.Tensor:
    """fn float32 [c (c + 2), c D] as tensor cores take it: `tiles(split(fn))`."""
    return tiles(split(fn))


def split(fn: torch.Tensor) -> torch.Tensor:
    """fn float32 [n, K] -> bf16 [3, n, K] whose sum it is, largest part first.

    Exact for finite values of 2^-100 or more: three times 8 of float32's 24 bits.
    """
    high = fn.bfloat16()
    rest = fn - high.float()
    middle = rest.bfloat16()
    return torch.stack((high, middle, (rest - middle.float()).bfloat16()))


def tiles(parts: torch.Tensor) -> torch.Tensor:
    """[3, c (c + 2), c D] -> [D / CHUNK, c, 3, c (c + 2), CHUNK], zeros behind D: what a program reads lies in one piece."""
    copies = math.isqrt(parts.shape[1] + 1) - 1
    parts = parts.unflatten(2, (copies, -1))
    parts = torch.nn.functional.pad(parts, (0, -parts.shape[3] % CHUNK)).unflatten(3, (-1, CHUNK))
    return parts.permute(3, 2, 0, 1, 4).contiguous()
