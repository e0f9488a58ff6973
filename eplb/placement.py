# SPDX-License-Identifier: Apache-2.0
"""Where experts go, from nothing but their load (L, E, P, R as in maps.py).

The policy is that of DeepSeek's EPLB (github.com/deepseek-ai/EPLB): replicate the heaviest expert until
all slots are taken, then give slots to ranks, the heaviest first, each to the lightest rank that has room.
After that come exchanges of slots between ranks, which that policy lacks.
"""

from __future__ import annotations

import heapq

import numpy as np

from .swaps import lower_peaks

ENOUGH = 0.995  # balancedness from which exchanges are not worth their time
ROUNDS = 4  # of exchanges, twice


def place(load: np.ndarray, physical: int, ranks: int, groups: int = 1, nodes: int = 1) -> np.ndarray:
    """The map of experts to slots, int64 [L, P], for a load [L, E] of any real dtype.

    With several nodes that divide `groups` evenly, the experts of a group (E / groups neighbours) and their
    replicas stay on one node; otherwise groups and nodes are ignored.  Of equals the lower
    index is taken, so that equal loads give equal maps.  Raises ValueError for sizes that do not divide and for loads that are negative or not finite.
    """
    load = checked(load, physical, ranks, groups, nodes)
    return improve(load, greedy(load, physical, ranks, groups, nodes), ranks, groups, nodes)


def checked(load: np.ndarray, physical: int, ranks: int, groups: int = 1, nodes: int = 1) -> np.ndarray:
    """The load as float64; a layer without load counts as evenly loaded, so that its replicas are spread."""
    load = np.asarray(load, np.float64)
    if load.ndim != 2:
        raise ValueError(f"load: {load.ndim} dimensions. Give [layers, experts]")
    experts = load.shape[1]
    if not np.isfinite(load).all() or (load < 0).any():
        raise ValueError("load: negative or not finite. Give counts of tokens")
    if not experts <= physical:
        raise ValueError(f"physical: {physical} slots are too few for {experts} experts")
    for name, whole, part in (("ranks", physical, ranks), ("nodes", ranks, nodes), ("groups", experts, groups)):
        if part < 1 or whole % part:
            raise ValueError(f"{name}: {part} does not divide {whole}. Choose one that does")
    return np.where(load.sum(1, keepdims=True) > 0, load, 1.0)


def greedy(load: np.ndarray, physical: int, ranks: int, groups: int = 1, nodes: int = 1) -> np.ndarray:
    """The published policy's map, int64 [L, P], of a `checked` load: its rank loads are those of vLLM's DefaultEplbPolicy."""
    layers, experts = load.shape
    if not hierarchical(groups, nodes):
        return _global(load, physical, ranks)
    size = experts // groups
    chosen = pack(load.reshape(layers, groups, size).sum(2), nodes)  # [L, nodes, groups / nodes]
    members = (chosen[..., None] * size + np.arange(size)).reshape(layers * nodes, -1)  # experts of each node
    inside = np.take_along_axis(load.repeat(nodes, axis=0), members, 1)
    placed = _global(inside, physical // nodes, ranks // nodes)
    return np.take_along_axis(members, placed, 1).reshape(layers, physical)


def improve(load: np.ndarray, given: np.ndarray, ranks: int, groups: int = 1, nodes: int = 1) -> np.ndarray:
    """`given` [L, P] after exchanges between ranks (of one node, where replicas stay inside): no layer's peak is higher."""
    target = load.sum(1) / ranks / ENOUGH
    if not hierarchical(groups, nodes):
        return lower_peaks(load, given, ranks, target, ROUNDS)
    layers, physical = given.shape
    parts = given.reshape(layers * nodes, -1)
    return lower_peaks(load.repeat(nodes, axis=0), parts, ranks // nodes, target.repeat(nodes), ROUNDS).reshape(layers, physical)


def hierarchical(groups: int, nodes: int) -> bool:
    return nodes > 1 and groups % nodes == 0


def replicate(load: np.ndarray, physical: int) -> tuple[np.ndarray, np.ndarray]:
    """(experts of the P replicas int64 [L, P], replicas of each expert int64 [L, E]): each one more goes to the expert
    whose replicas carry most, the lower one of two equals. No choice has a smaller largest replica."""
    layers, experts = load.shape
    chosen = np.tile(np.arange(physical), (layers, 1))
    replicas = np.ones((layers, experts), np.int64)
    share, rows = load.copy(), np.arange(layers)
    for slot in range(experts, physical):
        chosen[:, slot] = most = share.argmax(1)
        replicas[rows, most] += 1
        share[rows, most] = load[rows, most] / replicas[rows, most]
    return chosen, replicas


def pack(weight: np.ndarray, packs: int) -> np.ndarray:
    """Items of each pack, int64 [L, packs, n / packs], for weights [L, n]: the heaviest item first (the lower of two
    equals), each into the lightest pack (the lower of two equals) that has room."""
    layers, n = weight.shape
    room = n // packs
    if room == 1:
        return np.tile(np.arange(n)[:, None], (layers, 1, 1))
    order = np.argsort(-weight, axis=1, kind="stable")
    out = np.empty((layers, packs, room), np.int64)
    for layer, (items, weights) in enumerate(zip(order.tolist(), np.take_along_axis(weight, order, 1).tolist(), strict=True)):
        heap = [(0.0, p) for p in range(packs)]  # (weight, pack) of those with room
        members = [[] for _ in range(packs)]
        for item, w in zip(items, weights, strict=True):
            total, lightest = heap[0]
            chosen = members[lightest]
            chosen.append(item)
            if len(chosen) == room:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (total + w, lightest))
        out[layer] = members
    return out


def _global(load: np.ndarray, physical: int, ranks: int) -> np.ndarray:
    chosen, replicas = replicate(load, physical)
    weight = np.take_along_axis(load / replicas, chosen, 1)
    return np.take_along_axis(chosen, pack(weight, ranks).reshape(len(load), -1), 1)
