# SPDX-License-Identifier: Apache-2.0
"""Balancedness against its definition."""

import numpy as np
import pytest

from deepseek_v41_plugin.eplb import balance, maps


@pytest.mark.parametrize("layers,experts,redundant,ranks", [(1, 1, 0, 1), (3, 6, 2, 4), (2, 5, 7, 3), (4, 16, 0, 16), (2, 3, 21, 8)])
def test_loads_by_hand(rng, layers, experts, redundant, ranks):
    base = maps.initial(experts, redundant)
    given = np.stack([rng.permutation(base) for _ in range(layers)])
    load = rng.integers(0, 1000, (layers, experts))
    loads, slots = balance.rank_loads(load, given, ranks), balance.slot_loads(load, given)
    assert loads.dtype == slots.dtype == np.float64
    local = len(base) // ranks
    for layer in range(layers):
        expected = [load[layer, e] / list(given[layer]).count(e) for e in given[layer]]
        assert slots[layer] == pytest.approx(expected)
        by_rank = [sum(expected[r * local : (r + 1) * local]) for r in range(ranks)]
        assert loads[layer] == pytest.approx(by_rank)
        value = balance.balancedness(load, given, ranks)[layer]
        assert value == pytest.approx(np.mean(by_rank) / max(by_rank) if max(by_rank) else 1.0)
    assert loads.sum(1) == pytest.approx(load.sum(1))


def test_no_load_is_balanced_and_one_heavy_expert_is_not():
    given = np.tile(maps.initial(8, 0), (2, 1))
    load = np.zeros((2, 8), np.int64)
    load[1, 3] = 5
    assert balance.balancedness(load, given, 4).tolist() == [1.0, 0.25]


def test_ranks_may_be_renamed(rng):
    given = np.stack([rng.permutation(maps.initial(12, 4)) for _ in range(3)])
    load = rng.random((3, 12))
    renamed = given.reshape(3, 8, 2)[:, rng.permutation(8)].reshape(3, 16)
    assert balance.balancedness(load, renamed, 8) == pytest.approx(balance.balancedness(load, given, 8))
