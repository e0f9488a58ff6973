# SPDX-License-Identifier: Apache-2.0
"""Which slot holds which expert.

L MoE layers, E logical experts, P = E + redundant slots, R ranks of P / R slots each: rank r holds the
slots r * P/R to (r + 1) * P/R - 1.
"""

from __future__ import annotations

import numpy as np


def initial(experts: int, redundant: int) -> np.ndarray:
    """vLLM's first map, int64 [P]: every expert once, then the first ones again."""
    return np.concatenate((np.arange(experts), np.arange(redundant) % experts))


def logical_maps(physical_to_logical: np.ndarray, experts: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots of each expert, ascending and -1 behind them, int64 [L, E, slots]; their number, int64 [L, E].

    physical_to_logical int64 [L, P].  Raises ValueError when an expert has more than `slots` replicas.
    """
    layers, physical = physical_to_logical.shape
    order = np.argsort(physical_to_logical, axis=1, kind="stable")
    logical = np.take_along_axis(physical_to_logical, order, axis=1)
    replicas = np.zeros((layers, experts), np.int64)
    np.add.at(replicas, (np.arange(layers)[:, None], physical_to_logical), 1)
    if replicas.max() > slots:
        raise ValueError(f"slots: an expert has {replicas.max()} replicas. Give at least as many slots, not {slots}")
    first = np.cumsum(replicas, axis=1) - replicas
    which = np.arange(physical) - np.take_along_axis(first, logical, axis=1)
    out = np.full((layers, experts, slots), -1, np.int64)
    out[np.arange(layers)[:, None], logical, which] = order
    return out, replicas


def held(physical_to_logical: np.ndarray, experts: int, ranks: int) -> np.ndarray:
    """Whether a rank has an expert in one of its slots: bool [L, R, E]."""
    layers = len(physical_to_logical)
    out = np.zeros((layers, ranks, experts), bool)
    out[np.arange(layers)[:, None, None], np.arange(ranks)[:, None], physical_to_logical.reshape(layers, ranks, -1)] = True
    return out


def problem(physical_to_logical: np.ndarray, experts: int, ranks: int) -> str | None:
    """What is wrong with a map int64 [L, P], or None: every expert somewhere, P slots in equal parts."""
    physical = physical_to_logical.shape[1]
    if physical % ranks:
        return f"{physical} slots cannot be cut over {ranks} ranks"
    if physical_to_logical.min() < 0 or physical_to_logical.max() >= experts:
        return f"an expert outside 0 to {experts - 1}"
    for layer, row in enumerate(physical_to_logical):
        if len(missing := np.setdiff1d(np.arange(experts), row)):
            return f"layer {layer}: expert {missing[0]} is nowhere"
    return None


def valid_redundancy(experts: int, redundant: int, ranks: int) -> tuple[int, ...]:
    """The nearest numbers of redundant experts, one below (if any) and one above, that `ranks` divides with `experts`."""
    below = (experts + redundant) // ranks * ranks - experts
    return tuple(n for n in (below, below + ranks) if n >= 0)
