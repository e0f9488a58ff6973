# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint shard by shard, one tensor in memory at a time."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..checkpoint import TensorSpec
from ..checkpoint.expected import ITEM_BYTES
from ..checkpoint.index import INDEX_NAME


def plan_shards(specs: dict[str, TensorSpec], limit: int) -> list[list[str]]:
    """Tensor names per shard, in the order of ``specs``.

    A shard holds at most ``limit`` bytes unless one projection alone is larger; a weight
    and its scale stay together. Each Engram table has a shard of its own at the end.
    """
    shards: list[list[str]] = [[]]
    tables: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    for name in specs:
        stem = name.removesuffix(".weight").removesuffix(".scale")
        home = tables if stem.endswith(".engram.embed") else groups
        home.setdefault(stem, []).append(name)
    filled = 0
    for names in groups.values():
        size = sum(specs[n].nbytes for n in names)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += size
    return shards + list(tables.values())


def shard_names(count: int) -> list[str]:
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_index(folder: Path, plan, specs: dict[str, TensorSpec], notes: dict) -> None:
    """model.safetensors.index.json; ``notes`` join its metadata."""
    files = shard_names(len(plan))
    index = {
        "metadata": {"total_size": sum(s.nbytes for s in specs.values()), **notes},
        "weight_map": {n: file for file, names in zip(files, plan) for n in sorted(names)},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_shard(
    path: Path,
    names: list[str],
    specs: dict[str, TensorSpec],
    fetch: Callable[[str], np.ndarray],
) -> None:
    """One safetensors file; ``fetch(name)`` gives an array with the tensor's raw bytes.

    Wide dtypes come first, so that every tensor is aligned to its item size.
    """
    order = sorted(names, key=lambda n: (-ITEM_BYTES[specs[n].dtype], n))
    header: dict = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        spec = specs[name]
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            data = np.ascontiguousarray(fetch(name))
            if data.nbytes != specs[name].nbytes:
                raise ValueError(f"{name}: {data.nbytes} bytes for {specs[name]}")
            file.write(data.data)
