# SPDX-License-Identifier: Apache-2.0
"""A rebalance that starts from the map in use and changes few slots (L, E, P, R as in maps.py).

Only what a layer lacks is changed: first experts that became too heavy take slots of experts that have replicas
to spare, then slots are exchanged between ranks, until the layer is as balanced as the published
policy would have it.
"""

from __future__ import annotations

import numpy as np

from . import maps
from .balance import rank_loads, slot_loads
from .placement import checked, greedy, improve
from .swaps import lower_peaks

ROUNDS = 16  # of exchanges, twice
SAME = 1 + 1e-9  # two peaks within rounding


def rebalance(load: np.ndarray, old: np.ndarray, ranks: int, slack: float = 0.0) -> np.ndarray:
    """The next map, int64 [L, P], for a load [L, E] and the map in use, int64 [L, P].

    Each layer's balancedness is at least that of `placement.greedy`, the published policy, less `slack` (0 to 1).
    A layer that has it already, or has no load, is unchanged.  No layer has more `moved` slots than in
    `keep_slots(place(load, ...), old, ranks)`.  An expert that stays on its rank stays in its slot.
    Raises ValueError for loads and sizes that `placement.place` refuses, and for an `old` that is no map.
    """
    if not 0 <= slack < 1:
        raise ValueError(f"slack: {slack} is not at least 0 and below 1")
    old = np.asarray(old, np.int64)
    loaded = np.asarray(load).sum(-1) > 0
    load = checked(load, old.shape[-1], ranks)
    if wrong := "other layers than the load's" if len(old) != len(load) else maps.problem(old, load.shape[1], ranks):
        raise ValueError(f"old: {wrong}. Give the map in use")
    planned = greedy(load, old.shape[1], ranks)
    mean = load.sum(1) / ranks
    reached = mean / rank_loads(load, planned, ranks).max(1)
    limit = mean / np.maximum(reached - slack, 1e-9) * SAME
    todo = np.flatnonzero(loaded & (_peaks(load, old, ranks) > limit))
    new = old.copy()
    if len(todo):
        new[todo] = _fewest(load[todo], old[todo], planned[todo], ranks, limit[todo])
    return new


def keep_slots(new: np.ndarray, old: np.ndarray, ranks: int) -> np.ndarray:
    """`new` int64 [L, P] with the slots of each rank in the order that leaves most of them as in `old` [L, P]."""
    a, b = (m.reshape(len(m) * ranks, -1) for m in (new, old))
    local = a.shape[1]
    # the n-th replica of an expert on a rank is the same as the n-th before
    same = (a * local + _nth(a))[:, :, None] == (b * local + _nth(b))[:, None, :]  # [L * R, new slot, old slot]
    kept, left = same.any(1), ~same.any(2)  # of old slots; of new ones
    out = b.copy()
    out[~kept] = a[left]
    return out.reshape(new.shape)


def moved(old: np.ndarray, new: np.ndarray, ranks: int) -> np.ndarray:
    """Slots of `new` [L, P] whose expert was not on their rank in `old` [L, P]: what crosses between ranks, int64 [L]."""
    had = maps.held(old, max(old.max(), new.max()) + 1, ranks)
    return (~np.take_along_axis(had, new.reshape(len(new), ranks, -1), 2)).sum((1, 2))


def _fewest(load: np.ndarray, old: np.ndarray, planned: np.ndarray, ranks: int, limit: np.ndarray) -> np.ndarray:
    """`old` repaired, or `planned` improved where that is not within `limit` [L] or moves more."""
    best = keep_slots(improve(load, planned, ranks), old, ranks)
    cost = moved(old, best, ranks)
    # Replicas no larger than the published policy's, even where fewer would do today: they also tame the next window.
    way = _replicas(load, old, ranks, slot_loads(load, planned).max(1) * SAME)
    way = keep_slots(lower_peaks(load, way, ranks, limit, ROUNDS), old, ranks)
    better = (_peaks(load, way, ranks) <= limit) & (moved(old, way, ranks) <= cost)
    best[better] = way[better]
    return best


def _replicas(load: np.ndarray, old: np.ndarray, ranks: int, heaviest: np.ndarray) -> np.ndarray:
    """`old` [L, P] with slots given from experts that can spare a replica to the heaviest ones, until no replica
    carries more than `heaviest` [L] or none is left to give."""
    new = old.copy()
    layers, experts = load.shape
    physical = old.shape[1]
    at = np.arange(layers)[:, None] * experts
    replicas = np.bincount((new + at).ravel(), minlength=layers * experts).reshape(layers, experts)
    share = load / replicas
    active = np.arange(layers)
    if physical == experts:
        return new
    while len(active):
        n, now = np.arange(len(active)), share[active]
        need = now.argmax(1)
        most = now[n, need]
        count = replicas[active]
        without = np.where(count > 1, load[active] / np.maximum(count - 1, 1), np.inf)
        spare = without.argmin(1)
        go = (most > heaviest[active]) & (without[n, spare] < most)
        active, need, spare, most = active[go], need[go], spare[go], most[go]
        if not len(active):
            break
        n, here = np.arange(len(active)), new[active]
        # the slot of the spare expert on the rank that has most of it and least of the needy one, the lightest of several
        is_spare = here == spare[:, None]
        extra = ((here == need[:, None]).astype(np.int64) - is_spare).reshape(len(active), ranks, -1).sum(2)
        loads = np.take_along_axis(share[active], here, 1).reshape(len(active), ranks, -1).sum(2)
        loads += extra * loads.sum(1, keepdims=True)
        slot = np.where(is_spare, loads.repeat(physical // ranks, 1), np.inf).argmin(1)
        new[active, slot] = need
        replicas[active, need] += 1
        replicas[active, spare] -= 1
        for expert in (need, spare):
            share[active, expert] = load[active, expert] / replicas[active, expert]
    return new


def _peaks(load: np.ndarray, physical_to_logical: np.ndarray, ranks: int) -> np.ndarray:
    return rank_loads(load, physical_to_logical, ranks).max(1)


def _nth(rows: np.ndarray) -> np.ndarray:
    """For each entry of a row, how many before it are equal to it."""
    order = np.argsort(rows, axis=1, kind="stable")
    value = np.take_along_axis(rows, order, 1)
    at = np.arange(rows.shape[1])
    first = np.maximum.accumulate(np.where(np.diff(value, axis=1, prepend=-1) != 0, at, 0), axis=1)
    out = np.empty_like(rows)
    np.put_along_axis(out, order, at - first, 1)
    return out
