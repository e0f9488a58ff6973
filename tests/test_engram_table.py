# SPDX-License-Identifier: Apache-2.0
"""The mapped table: right rows, few pages, and nothing read ahead."""

import os
from pathlib import Path

import numpy as np
import torch

from deepseek_v41_plugin.model.engram_table import EngramTable

DIM = 64


def open_table(path: Path, weight: np.ndarray, scale: np.ndarray, lead: int) -> EngramTable:
    """A file as a shard has it: other bytes, the weight, the scale, at unaligned offsets."""
    path.write_bytes(b"x" * lead + weight.tobytes() + scale.tobytes())
    rows = len(weight)
    return EngramTable.open((path, lead), (path, lead + weight.size), rows, DIM)


def test_lookup_gives_the_rows_asked_for(tmp_path, run_rng):
    rng = np.random.default_rng(run_rng.getrandbits(64))
    weight = rng.integers(0, 120, (500, DIM), dtype=np.uint8)
    scale = rng.integers(120, 134, (500, DIM // 32), dtype=np.uint8)
    table = open_table(tmp_path / "shard", weight, scale, int(rng.integers(1, 9000)))
    rows = rng.integers(0, 500, (7, 3))
    got = table.lookup(rows, torch.float64, torch.device("cpu"))
    assert got.shape == (7, 3 * DIM)
    values = torch.from_numpy(weight).view(torch.float8_e4m3fn).double().numpy()
    want = values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
    assert np.array_equal(got.numpy(), want[rows].reshape(7, -1))


def resident(path: Path) -> int:
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(path)):
            inside = True
        elif line.startswith("Rss:") and inside:
            total += int(line.split()[1]) * 1024
            inside = False
    return total


def test_only_the_pages_of_the_rows_are_read(tmp_path):
    """A 512 MiB table of holes: 200 lookups may touch 200 pages of each part, plus what the kernel
    maps around them of pages that are cached already."""
    path, rows = tmp_path / "sparse", (512 << 20) // DIM
    path.touch()
    os.truncate(path, rows * (DIM + DIM // 32))
    table = EngramTable.open((path, 0), (path, rows * DIM), rows, DIM)
    table.lookup(np.random.default_rng(1).integers(0, rows, (200, 1)), torch.float32, torch.device("cpu"))
    assert 0 < resident(path) < 8 << 20


def test_the_stand_in_for_dummy_weights_is_zero_for_any_row():
    table = EngramTable.zeros(DIM)
    assert not table.lookup(np.array([[5, 10**8]]), torch.float32, torch.device("cpu")).any()
