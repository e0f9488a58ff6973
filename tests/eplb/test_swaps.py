# SPDX-License-Identifier: Apache-2.0
"""Exchanges of slots: never a heavier peak, no replicas brought together, and none left where they end."""

import numpy as np
import pytest

from deepseek_v41_plugin.eplb import maps
from deepseek_v41_plugin.eplb.balance import rank_loads, slot_loads
from deepseek_v41_plugin.eplb.swaps import lower_peaks


def case(rng, layers, experts, redundant):
    rows = [np.concatenate((np.arange(experts), rng.integers(0, experts, redundant))) for _ in range(layers)]
    return rng.pareto(1.5, (layers, experts)), np.stack([rng.permutation(row) for row in rows])


def helpful(loads, slots, experts):
    """An exchange of the heaviest rank that lowers it, of one layer [R, local], or None: counted out."""
    heavy = loads.argmax()
    for light in set(range(len(loads))) - {heavy}:
        for a, e in zip(slots[heavy], experts[heavy], strict=True):
            for b, f in zip(slots[light], experts[light], strict=True):
                apart = e not in experts[light] and f not in experts[heavy]
                if apart and max(loads[heavy] - a + b, loads[light] + a - b) < loads[heavy] * (1 - 2e-9):
                    return heavy, light, e, f
    return None


@pytest.mark.parametrize("experts,redundant,ranks", [(5, 0, 1), (2, 0, 2), (8, 0, 2), (7, 2, 3), (8, 2, 5), (40, 8, 8), (3, 12, 5)])
def test_ends_where_no_exchange_helps(rng, experts, redundant, ranks):
    load, given = case(rng, 6, experts, redundant)
    before = given.copy()
    got = lower_peaks(load, given, ranks, np.zeros(6), 1000)
    assert (given == before).all()
    assert (np.sort(got, axis=1) == np.sort(given, axis=1)).all()
    assert (rank_loads(load, got, ranks).max(1) <= rank_loads(load, given, ranks).max(1) * (1 + 1e-9)).all()
    by_rank = got.reshape(6, ranks, -1)
    slots = slot_loads(load, got).reshape(by_rank.shape)
    for layer in range(6):
        assert helpful(slots[layer].sum(1), slots[layer], by_rank[layer]) is None


@pytest.mark.parametrize("experts,redundant,ranks", [(7, 2, 3), (40, 8, 8), (6, 14, 5), (24, 40, 16)])
def test_no_replicas_are_brought_together(rng, experts, redundant, ranks):
    """An expert never lies on fewer ranks than before."""
    load, given = case(rng, 6, experts, redundant)
    got = lower_peaks(load, given, ranks, np.zeros(6), 1000)
    spread = [[[(row.reshape(ranks, -1) == e).any(1).sum() for e in range(experts)] for row in m] for m in (given, got)]
    assert (np.array(spread[1]) >= np.array(spread[0])).all()


def test_the_best_exchange_is_taken():
    """15 and 5: only 5 against 0 gives 10 and 10."""
    load, given = np.array([[9.0, 5.0, 1.0, 3.0, 0.0, 2.0]]), np.arange(6)[None]
    assert lower_peaks(load, given, 2, np.array([10.0]), 10).tolist() == [[0, 4, 2, 3, 1, 5]]


def test_a_layer_within_its_target_is_left_alone(rng):
    load, given = case(rng, 4, 10, 2)
    target = rank_loads(load, given, 3).max(1) * np.array([1, 0.5, 1.1, 0.5])
    got = lower_peaks(load, given, 3, target, 50)
    assert (got[[0, 2]] == given[[0, 2]]).all()
    assert (got[1] == lower_peaks(load[[1]], given[[1]], 3, target[[1]], 50)[0]).all(), "layers do not see each other"


def test_rounds_bound_the_work(rng):
    load, given = case(rng, 3, 24, 0)
    assert (lower_peaks(load, given, 4, np.zeros(3), 0) == given).all()
    # a round of pairs and an exchange with any rank touch 2 slots in each of 2 pairs, and 2 more
    assert ((lower_peaks(load, given, 4, np.zeros(3), 1) != given).sum(1) <= 6).all()
