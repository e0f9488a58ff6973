# SPDX-License-Identifier: Apache-2.0
"""Whether a weight's scales lie close enough for E4M3 to hold them."""

from __future__ import annotations

import torch

OCTAVES = 11
COLUMNS = 4  # blocks of 32 columns under one unit


def spread_ok(w_scale: torch.Tensor) -> bool:
    """Whether E8M0 bytes [E, rows, n] may be `narrow`: in each 128 columns of a row they differ by at most 11 octaves, and none is 0 or 255.

    E4M3's normal numbers span 2^-6 to 2^8; 0.5 to 6 times 2^s fits in for 12 values of s, subnormals unused.
    Waits for the device: call it when weights have been loaded.  Where experts move between ranks, all ranks must agree.
    """
    if w_scale.shape[-1] % COLUMNS:
        return False
    fine = torch.ones((), dtype=torch.bool, device=w_scale.device)
    for some in w_scale.split(32):
        blocks = some.unflatten(-1, (-1, COLUMNS))
        least, most = blocks.amin(-1), blocks.amax(-1)
        fine &= ((most - least <= OCTAVES) & (least > 0) & (most < 255)).all()
    return bool(fine)
