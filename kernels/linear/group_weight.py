# SPDX-License-Identifier: Apache-2.0
"""The order of wo_a's bytes that its GPU kernel reads: four columns, 32 apart, in one word."""

from __future__ import annotations

import torch

# Columns whose order changes among themselves: four blocks of 32, each under its own scale.
COLUMNS = 128
# Rows copied at a time.
_ROWS = 4096


def pack_group(weight: torch.Tensor, in_place: bool = False) -> torch.Tensor | None:
    """weight E4M3 [o, K], contiguous -> int32 words [o, K/4] of the same bytes, or None where o is no multiple of 32 or K none of 128.

    Byte p of word j of every 128 columns is column 32 p + j of them.  `in_place` changes the order within `weight`'s memory and returns a
    view of it: nothing may read `weight` itself from then on.
    """
    if weight.shape[0] % 32 or weight.shape[1] % COLUMNS:
        return None
    out = weight.view(torch.uint8) if in_place else torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for part, to in zip(weight.view(torch.uint8).split(_ROWS), out.split(_ROWS), strict=True):
        to.copy_(part.unflatten(1, (-1, 4, 32)).transpose(2, 3).flatten(1))
    return out.view(torch.int32)


def unpack_group(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_group`: int32 [o, K/4] -> E4M3 [o, K]."""
    return words.view(torch.uint8).unflatten(1, (-1, 32, 4)).transpose(2, 3).flatten(1).view(torch.float8_e4m3fn)
