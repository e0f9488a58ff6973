# SPDX-License-Identifier: Apache-2.0
"""Weights under one power of two a row: the 32 x 32 blocks' exponents moved into the E4M3 values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats.scalar import E4M3_MAX, ceil_log2, e4m3, pow2

BLOCK = 32
# Of the largest value of a 32 x 32 block: what a value of it may be off by.
BOUND = 2.0**-11
# Elements looked at together: 64 MiB in float32.
SLAB = 1 << 24
# Row scales are normal in float32: kernels may flush what lies below.
_LEAST, _MOST = -126, 127


class RowWeight(NamedTuple):
    """Values q * scale: q E4M3 [o, i], scale float32 [o], a power of two."""

    q: torch.Tensor
    scale: torch.Tensor

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """[o, i] in `dtype`; exact in bf16 and wider."""
        return self.q.to(dtype) * self.scale.to(dtype)[:, None]


def row_weight(weight: torch.Tensor, scale: torch.Tensor, in_place: bool = False) -> RowWeight | None:
    """weight E4M3 [o, i] under E8M0 bytes [ceil(o/32), ceil(i/32)] -> the same values under one scale a row, or None.

    A row's scale is 2^ceil(log2(largest/448)), so its largest value keeps all its bits.  A value that falls below
    E4M3's 2^-6 there is rounded to a multiple of 2^-9, off by 2^-10 at most.  None unless every value is off by
    at most 2^-11 of its block's largest (`BOUND`), or where a value is not finite.  A block whose scale was chosen by
    its largest value (so that it lies above 224) is within the bound up to 2^6 below its row's scale.

    `in_place` writes into `weight`, and only once all of it is known to be within the bound; else a copy is returned.
    Temporaries: about 5 * SLAB floats.  Waits for the device: for use after loading.
    """
    columns = weight.shape[1]
    rows = max(SLAB // max(columns, 1) // BLOCK, 1) * BLOCK
    parts = [slice(first, first + rows) for first in range(0, weight.shape[0], rows)]
    exponents = []
    for part in parts:
        exponent = _exponents(weight, scale, part)
        if exponent is None or not _within(weight, scale, part, exponent):
            return None
        exponents.append(exponent)
    q = weight if in_place else torch.empty_like(weight)
    for part, exponent in zip(parts, exponents, strict=True):
        q[part] = _moved(weight, scale, part, exponent)[0]
    return RowWeight(q, pow2(torch.cat(exponents), torch.float32) if parts else weight.new_empty(0, dtype=torch.float32))


def _blocks(weight: torch.Tensor, scale: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(values float32 [n, blocks, 32], exponents int32 [n, blocks]) of some rows; columns filled up with zeros."""
    values = weight[part].float()
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    exponent = scale[part.start // BLOCK : -(-part.stop // BLOCK)].int() - 127
    return values, exponent.repeat_interleave(BLOCK, 0)[: values.shape[0]]


def _exponents(weight: torch.Tensor, scale: torch.Tensor, part: slice) -> torch.Tensor | None:
    """The rows' exponents, int32 [n]; None where a value is not finite.  A row of zeros has 0."""
    values, exponent = _blocks(weight, scale, part)
    largest = (values.abs().amax(-1).double() * pow2(exponent, torch.float64)).amax(-1)
    if not bool((largest.isfinite() & (exponent < 128).all(-1)).all()):
        return None
    row = ceil_log2(largest.clamp(min=2.0**-200) / E4M3_MAX)
    if bool((row > _MOST).any()):
        return None
    return torch.where(largest == 0, 0, row.clamp(min=_LEAST))


def _moved(weight: torch.Tensor, scale: torch.Tensor, part: slice, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(new E4M3 [n, i], old float32 [n, blocks, 32], shifts int32 [n, blocks]): new = round(old * 2^shift)."""
    old, exponent = _blocks(weight, scale, part)
    # Above 17 (2^-9 becomes 256) only zeros are shifted; below -20 all becomes zero.
    shift = (exponent - row[:, None]).clamp(-30, 20)
    return e4m3(old * pow2(shift, torch.float32)[..., None]).flatten(1)[:, : weight.shape[1]], old, shift


def _within(weight: torch.Tensor, scale: torch.Tensor, part: slice, row: torch.Tensor) -> bool:
    new, old, shift = _moved(weight, scale, part, row)
    new = torch.nn.functional.pad(new.float(), (0, old.shape[1] * BLOCK - new.shape[1])).view_as(old)
    error = (new.mul_(pow2(-shift, torch.float32)[..., None]).sub_(old)).abs_().amax(-1)
    largest = torch.nn.functional.pad(old.abs().amax(-1), (0, 0, 0, -len(old) % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1)
    return bool((error <= BOUND * largest.repeat_interleave(BLOCK, 0)[: len(old)]).all())
