# SPDX-License-Identifier: Apache-2.0
"""Tensors out of mapped shards, one shard after the other."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import torch

from .index import TensorEntry

DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8, "I8": torch.uint8, "U8": torch.uint8,
}  # fmt: skip


def stream(
    entries: dict[str, TensorEntry], want: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the wanted entries, shard by shard, in file order.

    A tensor is a read-only view of its mapped shard, valid until the next is asked for: copy it.
    Packed and scale bytes come as uint8. Only wanted bytes are read; a shard is unmapped, and its
    pages are given back, before the next is opened.
    """
    shards: dict = {}
    for name, entry in entries.items():
        if want(name):
            shards.setdefault(entry.path, []).append((entry.begin, name))
    for path in sorted(shards):
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for begin, name in sorted(shards[path]):
            entry = entries[name]
            size = entry.end - begin
            tensor = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=begin)
            if begin % DTYPES[entry.dtype].itemsize:
                tensor = tensor.clone()
            yield name, tensor.view(DTYPES[entry.dtype]).view(entry.shape)
        del tensor, mapped
