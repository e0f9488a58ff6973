# SPDX-License-Identifier: Apache-2.0
"""How evenly a map spreads a load over the ranks (L, E, P, R as in maps.py)."""

from __future__ import annotations

import numpy as np


def slot_loads(load: np.ndarray, physical_to_logical: np.ndarray) -> np.ndarray:
    """Load of each slot, float64 [L, P]: replicas of an expert share its load [L, E] evenly."""
    layers, experts = load.shape
    at = physical_to_logical + experts * np.arange(layers)[:, None]
    replicas = np.bincount(at.ravel(), minlength=layers * experts)
    return (load.ravel() / np.maximum(replicas, 1))[at]


def rank_loads(load: np.ndarray, physical_to_logical: np.ndarray, ranks: int) -> np.ndarray:
    """Load of each rank, float64 [L, R]."""
    return slot_loads(load, physical_to_logical).reshape(len(load), ranks, -1).sum(2)


def balancedness(load: np.ndarray, physical_to_logical: np.ndarray, ranks: int) -> np.ndarray:
    """Mean over largest rank load of each layer, float64 [L]: at most 1, and 1 where there is no load."""
    loads = rank_loads(load, physical_to_logical, ranks)
    largest = loads.max(1)
    return np.divide(loads.mean(1), largest, out=np.ones(len(loads)), where=largest > 0)
