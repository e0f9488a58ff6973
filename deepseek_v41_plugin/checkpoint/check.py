# SPDX-License-Identifier: Apache-2.0
"""Comparing a checkpoint's headers with what its config calls for."""

from pathlib import Path

from ..config import ModelConfig
from ..config_fields import shorten
from .expected import TensorSpec, expected_tensors
from .index import TensorEntry, clip, raise_problems, read_index

# Raw bytes may be declared as plain uint8.
_ALIASES = {"I8": ("I8", "U8"), "F8_E8M0": ("F8_E8M0", "U8")}


def _compare(name: str, want: TensorSpec, got: TensorEntry) -> str | None:
    if got.shape != want.shape:
        return (
            f"{name} in shard {clip(got.path.name)} has shape {shorten(list(got.shape))},"
            f" the config calls for {list(want.shape)}"
        )
    if got.dtype not in _ALIASES.get(want.dtype, (want.dtype,)):
        return (
            f"{name} in shard {clip(got.path.name)} has dtype {got.dtype},"
            f" the config calls for {want.dtype}"
        )
    return None


def validate(
    cfg: ModelConfig, folder: str | Path, entries: dict[str, TensorEntry] | None = None
) -> list[str]:
    """Check all names, shapes and dtypes from the shard headers alone.

    ``entries`` may carry an earlier ``read_index(folder)``. Returns the names of tensors
    that nothing asks for, sorted. Raises CheckpointError naming each offending tensor and
    its shard (at most five, then the count). Draft and vision tensors are asked for as far
    as the config has stages or a tower.
    """
    found = read_index(folder) if entries is None else entries
    expected = expected_tensors(cfg)
    neighbours = {name.rsplit(".", 1)[0]: entry.path.name for name, entry in found.items()}
    problems = []
    for name, want in expected.items():
        got = found.get(name)
        if got is not None:
            problem = _compare(name, want, got)
        else:
            near = neighbours.get(name.rsplit(".", 1)[0])
            where = f"any shard (its sibling is in {clip(near)})" if near else "any shard"
            problem = f"{name} is missing from {where}"
        if problem:
            problems.append(problem)
    raise_problems(problems)
    return sorted(found.keys() - expected.keys())
