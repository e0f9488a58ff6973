# SPDX-License-Identifier: Apache-2.0
"""The n-gram table: mapped from its shard, shared by every process of the node, never read whole."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from ..kernels.formats.blocks import scaled_rows


class EngramTable:
    """E4M3 rows [rows, dim] under E8M0 bytes [rows, dim/32], gathered on the host.

    The maps are read-only and advised MADV_RANDOM: a lookup touches only the pages of its rows,
    and the kernel's page cache holds one copy for all processes.
    """

    def __init__(self, weight: np.ndarray, scale: np.ndarray):
        self.weight, self.scale = weight, scale

    @classmethod
    def open(cls, weight: tuple[Path, int], scale: tuple[Path, int], rows: int, dim: int) -> EngramTable:
        """Map a table; weight and scale are (shard, byte offset) of the two tensors."""
        return cls(_map(*weight, (rows, dim)), _map(*scale, (rows, dim // 32)))

    @classmethod
    def zeros(cls, dim: int) -> EngramTable:
        """A one-row stand-in for dummy weights: every row is zero."""
        return cls(np.zeros((1, dim), np.uint8), np.full((1, dim // 32), 127, np.uint8))

    def lookup(self, rows: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """rows int64 [T, C] -> values [T, C * dim] in `dtype` on `device`."""
        if self.weight.shape[0] == 1:
            rows = np.zeros_like(rows)
        weight = torch.from_numpy(self.weight[rows]).to(device).view(torch.float8_e4m3fn)
        scale = torch.from_numpy(self.scale[rows]).to(device)
        return scaled_rows(weight, scale, dtype).flatten(1)


def _map(path: Path, offset: int, shape: tuple[int, int]) -> np.ndarray:
    mapped = np.memmap(path, np.uint8, "r", offset, shape)
    mapped._mmap.madvise(mmap.MADV_RANDOM)
    return mapped
