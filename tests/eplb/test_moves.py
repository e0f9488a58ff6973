# SPDX-License-Identifier: Apache-2.0
"""The moves of a layer, carried out on lists, against what they promise."""

import itertools
from collections import Counter

import numpy as np
import pytest

from deepseek_v41_plugin.eplb import maps
from deepseek_v41_plugin.eplb.moves import digest, moves
from tests.eplb.test_maps import random_map


def carry_out(old: np.ndarray, plans: list, ranks: int) -> np.ndarray:
    """The experts in all slots after the moves; every push reads what its sender has before any fill."""
    local = len(old) // ranks
    buffers = np.full((ranks, local), -1)
    for rank, plan in enumerate(plans):
        for slot, peer, row in plan.pushes:
            assert buffers[peer, row] == -1, "two pushes into one row"
            buffers[peer, row] = old[rank * local + slot]
    out = old.copy()
    for rank, plan in enumerate(plans):
        for slot, row, n in plan.fills:
            out[rank * local + slot : rank * local + slot + n] = buffers[rank, row : row + n]
    return out


def sizes(rng: np.random.Generator) -> tuple[int, int, int]:
    """Experts, redundant experts, ranks."""
    ranks, local = int(rng.integers(1, 9)), int(rng.integers(1, 13))
    experts = int(rng.integers(1, ranks * local + 1))
    return experts, ranks * local - experts, ranks


def test_moves_turn_old_into_new(rng):
    for _ in range(300):
        experts, redundant, ranks = sizes(rng)
        old, new = random_map(rng, 2, experts, redundant)
        keep = rng.random(len(old)) < rng.random()  # may make `new` lose experts, which moves do not mind
        new = np.where(keep, old, new)
        plans = moves(old, new, ranks)
        assert np.array_equal(carry_out(old, plans, ranks), new)


def test_each_expert_crosses_once_and_only_if_it_must(rng):
    for _ in range(100):
        experts, redundant, ranks = sizes(rng)
        old, new = random_map(rng, 2, experts, redundant)
        local = len(old) // ranks
        crossings = Counter(
            (int(old[rank * local + slot]), peer)
            for rank, plan in enumerate(moves(old, new, ranks)) for slot, peer, _ in plan.pushes if peer != rank
        )
        parts = [[set(m.reshape(ranks, local)[rank].tolist()) for m in (old, new)] for rank in range(ranks)]
        gained = {(expert, rank) for rank, (before, now) in enumerate(parts) for expert in now - before}
        assert crossings == dict.fromkeys(gained, 1)


def test_nothing_moves_without_a_change(rng):
    old = random_map(rng, 1, 12, 4)[0]
    assert all(plan.pushes == plan.fills == () for plan in moves(old, old, 4))


def test_senders_share(rng):
    """Expert 0 is everywhere but on the last ranks, which all want it: nobody sends a second one before all sent one."""
    ranks, local = 8, 2
    old = np.array([[0, 1 + r] for r in range(4)] + [[5 + r, 9 + r] for r in range(4)]).ravel()
    new = old.reshape(ranks, local).copy()
    new[4:, rng.integers(0, 2)] = 0
    plans = moves(old, new.ravel(), ranks)
    assert [len(plan.pushes) for plan in plans] == [1] * 4 + [0] * 4


def test_turns_rotate():
    """All ranks give all others something: in each turn every rank receives once."""
    ranks = 5
    old = np.arange(ranks * ranks)
    new = old.reshape(ranks, ranks).T.ravel()
    plans = moves(old, new, ranks)
    for turn in itertools.zip_longest(*(plan.pushes for plan in plans)):
        assert len({peer for _, peer, _ in turn}) == ranks
    assert [peer for _, peer, _ in plans[2].pushes] == [3, 4, 0, 1]


def test_runs_are_joined():
    old = maps.initial(8, 0)
    new = np.array([4, 5, 6, 7, 0, 1, 2, 3])
    assert [plan.fills for plan in moves(old, new, 2)] == [((0, 0, 4),)] * 2
    assert moves(np.array([0, 1, 2, 3]), np.array([0, 3, 3, 2]), 2)[0].fills == ((1, 1, 1),)
    assert moves(np.array([0, 1, 2, 3, 4, 5]), np.array([3, 3, 3, 0, 1, 2]), 2)[0].fills == ((0, 0, 1), (1, 0, 1), (2, 0, 1))


@pytest.mark.parametrize("ranks", [1, 32])
def test_real_size_is_deterministic(rng, ranks):
    old, new = random_map(rng, 2, 384, 32)
    assert moves(old, new, ranks) == moves(old.copy(), new.copy(), ranks)


def test_digest(rng):
    given = random_map(rng, 2, 9, 3)
    other = given.copy()
    other[1, rng.integers(0, 12)] += 1
    different = {digest(given), digest(other), digest(given[0]), digest(given[0], given[1]), digest(given.reshape(1, -1)), digest(given[::-1])}
    assert len(different) == 6 and digest(given) == digest(given.astype(np.int32))
