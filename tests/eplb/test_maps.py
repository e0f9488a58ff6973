# SPDX-License-Identifier: Apache-2.0
"""Maps of experts to slots against their definition."""

import numpy as np
import pytest

from deepseek_v41_plugin.eplb import maps


def random_map(rng: np.random.Generator, layers: int, experts: int, redundant: int) -> np.ndarray:
    rows = [np.concatenate((np.arange(experts), rng.integers(0, experts, redundant))) for _ in range(layers)]
    return np.stack([rng.permutation(row) for row in rows])


def test_initial_is_every_expert_then_the_first_again():
    assert maps.initial(4, 0).tolist() == [0, 1, 2, 3]
    assert maps.initial(4, 6).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("experts,redundant", [(1, 0), (5, 0), (5, 3), (7, 20), (384, 32)])
def test_logical_maps(rng, experts, redundant):
    given = random_map(rng, 3, experts, redundant)
    slots, replicas = maps.logical_maps(given, experts, redundant + 1)
    for layer in range(3):
        for expert in range(experts):
            held = np.flatnonzero(given[layer] == expert)
            assert replicas[layer, expert] == len(held)
            assert slots[layer, expert].tolist() == held.tolist() + [-1] * (redundant + 1 - len(held))


def test_too_few_slots():
    with pytest.raises(ValueError, match="3 replicas"):
        maps.logical_maps(np.array([[0, 0, 0, 1]]), 2, 2)


def test_problems(rng):
    good = random_map(rng, 2, 6, 2)
    assert maps.problem(good, 6, 4) is None
    assert "cut over 3" in maps.problem(good, 6, 3)
    assert "outside" in maps.problem(np.where(good == 5, 6, good), 6, 4)
    bad = good.copy()
    bad[1][bad[1] == 2] = 3
    assert maps.problem(bad, 6, 4) == "layer 1: expert 2 is nowhere"


@pytest.mark.parametrize("experts,redundant,ranks,nearest", [(384, 1, 32, (0, 32)), (384, 33, 32, (32, 64)), (128, 0, 48, (16,)), (6, 1, 4, (2,))])
def test_nearest_valid_redundancy(experts, redundant, ranks, nearest):
    assert maps.valid_redundancy(experts, redundant, ranks) == nearest
