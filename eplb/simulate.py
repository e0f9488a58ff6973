# SPDX-License-Identifier: Apache-2.0
"""Recorded loads, and what a policy would have made of them (L, E, P, R as in maps.py; N windows)."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import maps
from .balance import balancedness
from .fewest_moves import keep_slots, moved, rebalance
from .placement import place

Policy = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # (load [L, E], map in use [L, P], R) -> next map

POLICIES: dict[str, Policy] = {
    "place": lambda load, old, ranks: keep_slots(place(load, old.shape[1], ranks), old, ranks),
    "fewest_moves": rebalance,
    "none": lambda load, old, ranks: old,
}
LEAST = {"ranks": 1, "redundant": 0, "expert_bytes": 0}  # of a recording's numbers


@dataclass(frozen=True)
class Recording:
    """Tokens routed to each expert in each window, int64 [N, L, E], and what they were recorded from, where it is known.

    ranks: expert parallel ones.  redundant: experts.  expert_bytes: of an expert's weights in a layer.
    """

    loads: np.ndarray
    name: str = ""
    ranks: int | None = None
    redundant: int | None = None
    expert_bytes: int | None = None


def save(
    path: Path | str, loads: np.ndarray, name: str = "", *, ranks: int | None = None, redundant: int | None = None, expert_bytes: int | None = None,
) -> None:
    """Write loads, integers [N, L, E], and the rest of a `Recording` to `path`, under exactly that name.

    Raises ValueError for what `load` would refuse, and then writes nothing.
    """
    loads = _checked(loads)
    given = {"ranks": ranks, "redundant": redundant, "expert_bytes": expert_bytes}
    numbers = {field: np.int64(_number(field, value)) for field, value in given.items() if value is not None}
    path = Path(path)
    part = path.with_name(f".{path.name}.part")  # a reader sees the old one or the new one
    with part.open("wb") as file:
        np.savez_compressed(file, loads=loads, name=np.str_(name), **numbers)
    part.replace(path)


def load(path: Path | str) -> Recording:
    """The recording in an .npz file.  Raises ValueError, which names the file and the field, and OSError."""
    try:
        if not zipfile.is_zipfile(path) and Path(path).exists():
            raise ValueError("not an .npz file. Record it with eplb.simulate.save")
        with np.load(path, allow_pickle=False) as file:
            if "loads" not in file:
                raise ValueError("loads: not there. Record it as int [windows, layers, experts]")
            numbers = {field: _number(field, file[field]) for field in LEAST if field in file}
            return Recording(_checked(file["loads"]), str(file["name"]) if "name" in file else "", **numbers)
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: {error}") from error


def _checked(loads: np.ndarray) -> np.ndarray:
    loads = np.asarray(loads)
    if loads.ndim != 3 or 0 in loads.shape:
        raise ValueError(f"loads: shape {list(loads.shape)}. Give [windows, layers, experts], none of them 0")
    if loads.dtype.kind not in "iu":
        raise ValueError(f"loads: {loads.dtype}. Give integers, counts of tokens")
    if loads.min() < 0:
        raise ValueError(f"loads: {loads.min()} is negative. Give counts of tokens")
    return loads.astype(np.int64)


def _number(field: str, value: int | np.ndarray) -> int:
    value = np.asarray(value)
    if value.ndim or value.dtype.kind not in "iu":
        raise ValueError(f"{field}: {value.dtype}, shape {list(value.shape)}. Give one whole number")
    if value < LEAST[field]:
        raise ValueError(f"{field}: {value}. Give {LEAST[field]} or more")
    return int(value)


@dataclass(frozen=True)
class Replay:
    balancedness: np.ndarray
    """Of each window under the map in use, float64 [N, L]."""
    moved: np.ndarray
    """Slots filled from another rank before each window, int64 [N, L]."""
    crossed: np.ndarray
    """Experts sent to another rank for them, int64 [N, L]."""


def replay(loads: np.ndarray, ranks: int, redundant: int, policy: Policy) -> Replay:
    """The first window meets vLLM's first map, each later one the map made of the window before it.  loads int [N, L, E]."""
    windows, layers, experts = loads.shape
    if (experts + redundant) % ranks:
        near = " or ".join(map(str, maps.valid_redundancy(experts, redundant, ranks)))
        raise ValueError(f"redundant: {experts} experts and {redundant} more cannot be cut over {ranks} ranks. Choose {near}")
    now = np.tile(maps.initial(experts, redundant), (layers, 1))
    balance = np.empty((windows, layers))
    slots, experts_sent = np.zeros((2, windows, layers), np.int64)
    for n in range(windows):
        if n:
            new = policy(loads[n - 1], now, ranks)
            slots[n], experts_sent[n], now = moved(now, new, ranks), crossing(now, new, ranks), new
        balance[n] = balancedness(loads[n], now, ranks)
    return Replay(balance, slots, experts_sent)


def crossing(old: np.ndarray, new: np.ndarray, ranks: int) -> np.ndarray:
    """Experts that a rank gains from `old` to `new`, maps [L, P], once however many slots they get there; over all ranks, int64 [L]."""
    experts = max(old.max(), new.max()) + 1
    return (maps.held(new, experts, ranks) & ~maps.held(old, experts, ranks)).sum((1, 2))


def uniform(loads: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As many tokens in each window and layer, each to an expert drawn evenly, int64 [N, L, E]."""
    experts = loads.shape[2]
    return rng.multinomial(loads.sum(2), np.full(experts, 1 / experts))
