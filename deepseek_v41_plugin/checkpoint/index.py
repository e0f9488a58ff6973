# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors headers: where each tensor lies, without touching its bytes."""

import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..config_fields import shorten

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_HEADER_LIMIT = 100_000_000
_NAME_LIMIT = 255
_SHOWN = 5
_SHOWN_CHARS = 780
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; one line naming tensors, shards and a remedy."""


class TensorEntry(NamedTuple):
    """One stored tensor; ``begin`` and ``end`` are byte offsets from the file's start."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def clip(name: str) -> str:
    """A tensor's or file's name on one line, at most 100 characters."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= 100 else text[:97] + "..."


def raise_problems(problems: list[str]) -> None:
    """Raise CheckpointError listing up to five of ``problems``, if there are any.

    Long ones are listed only as far as the message stays below 900 characters.
    """
    if not problems:
        return
    shown = problems[:_SHOWN]
    while len(shown) > 1 and len("; ".join(shown)) > _SHOWN_CHARS:
        shown.pop()
    text = "; ".join(shown)
    if len(problems) > len(shown):
        text += f"; and {len(problems) - len(shown)} more ({len(problems)} problems in all)"
    raise CheckpointError(f"{text}. Download the checkpoint again or choose another.")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise_problems([f"{path.name} cannot be read ({type(err).__name__})"])


def _is_file_name(name: Any) -> bool:
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name:
        return False
    return Path(name).name == name and len(name.encode("utf-8", "replace")) <= _NAME_LIMIT


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard file name, or None for a single unindexed file."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if (folder / SINGLE_NAME).is_file():
            return None
        raise CheckpointError(
            f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME} is there."
            " Point to a checkpoint's folder."
        )
    raw = _read_json(index)
    mapping = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise_problems([f"{INDEX_NAME} has no weight_map"])
    for name, shard in mapping.items():
        if not _is_file_name(shard):
            where = f"{INDEX_NAME} puts {clip(name)} in {shorten(shard)}"
            raise_problems([f"{where}, which is not a file name"])
    return mapping


def _parse_entry(path: Path, name: str, raw: Any, data: int) -> TensorEntry:
    """One header record; raises ValueError with the reason."""
    if not isinstance(raw, dict):
        raise ValueError("its record is not an object")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    for value in (shape, offsets):
        if not isinstance(value, list) or any(type(v) is not int or v < 0 for v in value):
            raise ValueError("its shape or data_offsets are malformed")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype {shorten(dtype)} is unknown")
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"data_offsets {shorten(offsets)} do not fit {dtype} {shorten(shape)}")
    return TensorEntry(path, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _layout_problem(shard: str, entries: dict[str, TensorEntry], begin: int) -> str | None:
    """The first gap or overlap between the tensors of a shard whose data start at ``begin``."""
    before, at = "the header", begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps" if entry.begin < at else "leaves a gap behind"
            starts = f"starts at data byte {shorten(entry.begin - begin)}, not {at - begin}"
            return f"{clip(name)} in shard {shard} {what} {clip(before)}: it {starts}"
        before, at = name, entry.end
    return None


def _read_shard(path: Path) -> tuple[dict[str, TensorEntry], list[str]]:
    """All tensors of one shard and the problems found in its header and size."""
    shard = clip(path.name)
    if not path.is_file():
        return {}, [f"shard {shard} is missing"]
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= _HEADER_LIMIT:
            return {}, [f"shard {shard} has a garbage header (length {length})"]
        if size < 8 + length:
            return {}, [f"shard {shard} is truncated inside its header ({size} bytes)"]
        try:
            header = json.loads(file.read(length).decode("utf-8"))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        return {}, [f"shard {shard} has a garbage header (no JSON object)"]
    entries: dict[str, TensorEntry] = {}
    problems = []
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        try:
            entries[name] = _parse_entry(path, name, raw, 8 + length)
        except ValueError as err:
            problems.append(f"{clip(name)} in shard {shard}: {err}")
    end = max((e.end for e in entries.values()), default=8 + length)
    if not problems and end != size:
        last = max(entries, key=lambda n: entries[n].end, default="nothing")
        what = "is truncated" if size < end else "has bytes behind its last tensor"
        ends = f"{clip(last)} ends at {shorten(end)}, the file at {size}"
        problems.append(f"shard {shard} {what}: {ends}")
    layout = None if problems else _layout_problem(shard, entries, 8 + length)
    return entries, problems + ([layout] if layout else [])


def read_index(folder: str | Path) -> dict[str, TensorEntry]:
    """Locate every tensor named by the index (or by a lone model.safetensors).

    Only headers are read. Raises CheckpointError for a missing or truncated shard, a
    garbage header, tensors that overlap or leave gaps, or a tensor that the index places in a
    shard without it.
    """
    folder = Path(folder)
    mapping = _weight_map(folder)
    if mapping is None:
        entries, problems = _read_shard(folder / SINGLE_NAME)
        raise_problems(problems)
        return entries
    by_shard: dict[str, list[str]] = defaultdict(list)
    for name, shard in mapping.items():
        by_shard[shard].append(name)
    found: dict[str, TensorEntry] = {}
    problems = []
    for shard in sorted(by_shard):
        entries, bad = _read_shard(folder / shard)
        if bad:
            first, more = by_shard[shard][0], len(by_shard[shard]) - 1
            needed = f" (needed for {clip(first)} and {more} more)"
            problems += [bad[0] + needed, *bad[1:]]
            continue
        for name in by_shard[shard]:
            if name in entries:
                found[name] = entries[name]
            else:
                where = f"shard {clip(shard)}, where the index puts it"
                problems.append(f"{clip(name)} is not in {where}")
    raise_problems(problems)
    return found
