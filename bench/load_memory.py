#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of loading, and what an Engram lookup reads.

    load_memory.py CHECKPOINT [--csv bench/data/load_memory.csv]

Loads the model in this process while a thread samples resident memory (anonymous and file-backed),
and compares the peak with the model's own bytes and the largest shard.  Then looks up rows of a
sparse Engram table (a file of holes) from two processes and prints how much of the mapping became
resident, and how much of that is shared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from rows import append, commit

from deepseek_v41_plugin import checkpoint
from deepseek_v41_plugin.config import ModelConfig
from deepseek_v41_plugin.model.engram_table import EngramTable
from deepseek_v41_plugin.model.loading import load_checkpoint
from deepseek_v41_plugin.model.model import Model
from deepseek_v41_plugin.model.settings import Settings

MIB = 2**20
DIM = 256


def resident() -> int:
    """Anonymous plus file-backed resident bytes of this process."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem"))


class Peak:
    """The highest `resident()` between entering and leaving."""

    def __enter__(self) -> Peak:
        self.value, self.running = resident(), True
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self) -> None:
        while self.running:
            self.value = max(self.value, resident())
            time.sleep(0.001)

    def __exit__(self, *_) -> None:
        self.running = False
        self.thread.join()


def mapping(path: Path) -> dict[str, int]:
    """Resident and shared bytes of this process's mappings of `path`."""
    total, inside = {"Rss": 0, "Shared_Clean": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split(" ")[0] and not value.endswith("kB"):
            inside = line.endswith(str(path.resolve()))
        elif inside and name in total:
            total[name] += int(value.split()[0]) * 1024
    return total


def look_up(path: Path, rows: int, count: int, barrier, results) -> None:
    table = EngramTable.open((path, 0), (path, rows * DIM), rows, DIM)
    chosen = np.random.default_rng(0).integers(0, rows, (count, 1))
    table.lookup(chosen, torch.float32, torch.device("cpu"))
    barrier.wait()
    results.put(mapping(path))
    barrier.wait()


def engram(path: Path, rows: int, count: int) -> dict[str, int]:
    """`mapping` of one of two processes that looked up the same rows of a sparse table."""
    path.touch()
    os.truncate(path, rows * (DIM + DIM // 32))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=look_up, args=(path, rows, count, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    seen = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return max(seen, key=lambda found: found["Rss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--table-rows", type=int, default=16_000_000, help="rows of 256 bytes in the sparse table")
    parser.add_argument("--lookups", type=int, default=1000)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    cfg = ModelConfig.from_hf(json.loads((args.checkpoint / "config.json").read_text()))
    shards = {entry.path for entry in checkpoint.read_index(args.checkpoint).values()}
    largest = max(path.stat().st_size for path in shards)
    before = resident()
    with Peak() as peak:
        model = Model(cfg, Settings())
        load_checkpoint(model, args.checkpoint)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    above = peak.value - before - size
    row = {
        "date": date.today(), "device": platform.processor() or platform.machine(), "torch": torch.__version__,
        "commit": commit(),
        "shards": len(shards), "largest_shard_mib": largest / MIB, "model_mib": size / MIB,
        "peak_above_model_mib": above / MIB,
    }
    with tempfile.TemporaryDirectory() as folder:
        seen = engram(Path(folder) / "table", args.table_rows, args.lookups)
    row |= {
        "engram_table_mib": args.table_rows * DIM / MIB, "engram_lookups": args.lookups,
        "engram_resident_mib": seen["Rss"] / MIB, "engram_shared_mib": seen["Shared_Clean"] / MIB,
    }
    for name, value in row.items():
        print(f"{name:22s} {value:.2f}" if isinstance(value, float) else f"{name:22s} {value}")
    print("within one shard" if above <= largest else "MORE than one shard above the model")
    if args.csv:
        append(args.csv, [{k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items()}])


if __name__ == "__main__":
    main()
