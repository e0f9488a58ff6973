# SPDX-License-Identifier: Apache-2.0
"""Rebalancing from the map in use: as balanced as the host's policy, and few slots changed."""

from collections import Counter

import numpy as np
import pytest
import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

from deepseek_v41_plugin.eplb import fewest_moves, maps, placement
from deepseek_v41_plugin.eplb.balance import balancedness

SIZES = [(384, 32, 32), (384, 0, 16), (128, 64, 64), (24, 8, 8), (7, 2, 3), (5, 0, 1), (1, 3, 4), (3, 45, 6), (16, 0, 16), (12, 4, 2)]


def random_map(rng, layers, experts, redundant):
    rows = [np.concatenate((np.arange(experts), rng.integers(0, experts, redundant))) for _ in range(layers)]
    return np.stack([rng.permutation(row) for row in rows])


def random_load(rng, layers, experts):
    """Of any skew, some of it zero, below 2 ** 24."""
    load = np.minimum(rng.pareto(rng.uniform(0.5, 3), (layers, experts)) * 1000, 1.5e7)
    return (load * (rng.random((layers, experts)) < rng.uniform(0.3, 1))).astype(np.int64)


def hosts(load, old, ranks):
    return DefaultEplbPolicy.rebalance_experts(torch.from_numpy(load), old.shape[1], 1, 1, ranks, torch.from_numpy(old)).numpy()


@pytest.mark.parametrize("slack", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("experts,redundant,ranks", SIZES)
def test_balanced_with_few_moves(rng, experts, redundant, ranks, slack):
    load, old = random_load(rng, 4, experts), random_map(rng, 4, experts, redundant)
    before = old.copy()
    new = fewest_moves.rebalance(load, old, ranks, slack)
    assert (old == before).all() and new.dtype == np.int64 and new.shape == old.shape
    assert maps.problem(new, experts, ranks) is None
    assert (balancedness(load, new, ranks) >= (balancedness(load, hosts(load, old, ranks), ranks) - slack) * (1 - 1e-8)).all()
    full = fewest_moves.keep_slots(placement.place(load, experts + redundant, ranks), old, ranks)
    moves = fewest_moves.moved(old, new, ranks)
    loaded = load.sum(1) > 0
    assert (moves <= fewest_moves.moved(old, full, ranks)).all()
    assert not moves[~loaded].any()
    for a, b in zip(*(m.reshape(4 * ranks, -1) for m in (old, new)), strict=True):
        assert (a == b).sum() == (Counter(a) & Counter(b)).total(), "what stays on a rank stays in its slot"


def test_what_is_balanced_stays(rng):
    load = random_load(rng, 5, 24)
    good = placement.place(load, 32, 8)
    assert (fewest_moves.rebalance(load, good, 8) == good).all()
    bad = good.copy()
    bad[[1, 3]] = random_map(rng, 2, 24, 8)
    new = fewest_moves.rebalance(load, bad, 8)
    assert (new[[0, 2, 4]] == good[[0, 2, 4]]).all()
    once = fewest_moves.rebalance(load, new, 8)
    assert (once == new).all(), "done once, nothing is left to do"


def test_going_back_is_taken_where_it_moves_less(rng):
    """Three slots passed round in a circle come back with three moves; repairs by exchanges of two often need more."""
    load = rng.pareto(1.0, (60, 24)) * 1000 + 1
    old = good = placement.place(load, 32, 8)
    old = old.copy()
    for row in old:
        slots = rng.permutation(8)[:3] * 4 + rng.integers(0, 4, 3)
        row[slots] = np.roll(row[slots], 1)
    assert (np.sort(old, axis=1) == np.sort(good, axis=1)).all()
    assert (fewest_moves.moved(old, fewest_moves.rebalance(load, old, 8), 8) <= 3).all()


def test_a_layer_without_load_is_left_alone(rng):
    load, old = random_load(rng, 3, 24) + 1, random_map(rng, 3, 24, 8)
    load[1] = 0
    new = fewest_moves.rebalance(load, old, 8)
    assert (new[1] == old[1]).all() and (new[[0, 2]] != old[[0, 2]]).any()


def test_one_hot_expert_costs_one_slot():
    """8 ranks of 4 slots, 8 to spare: an expert becomes twice as heavy as a rank may be, and takes two slots at most with an exchange each."""
    load = np.full((1, 24), 100)
    old = placement.place(load, 32, 8)
    load[0, 5] = 600
    assert balancedness(load, old, 8)[0] < 0.65
    new = fewest_moves.rebalance(load, old, 8, slack=0.1)
    assert balancedness(load, new, 8)[0] >= balancedness(load, placement.place(load, 32, 8), 8)[0] - 0.1
    assert 1 <= fewest_moves.moved(old, new, 8)[0] <= 16
    assert fewest_moves.moved(old, fewest_moves.keep_slots(placement.place(load, 32, 8), old, 8), 8)[0] > 16


def test_a_drift_moves_a_fraction_of_what_the_host_moves(rng):
    weight = rng.permuted(1 / np.arange(1, 385)) * np.ones((4, 1))
    ours = theirs = np.tile(maps.initial(384, 32), (4, 1))
    count = np.zeros(2)
    for window in range(5):
        weight = weight * np.exp(0.1 * rng.standard_normal(weight.shape))
        load = (1e6 * weight / weight.sum(1, keepdims=True)).astype(np.int64)
        a, b = fewest_moves.rebalance(load, ours, 32), hosts(load, theirs, 32)
        if window:
            count += fewest_moves.moved(ours, a, 32).sum(), fewest_moves.moved(theirs, b, 32).sum()
        ours, theirs = a, b
    assert count[0] < count[1] / 2


def test_layers_are_alone_and_ranks_may_be_renamed(rng):
    load, old = random_load(rng, 4, 24), random_map(rng, 4, 24, 8)
    new = fewest_moves.rebalance(load, old, 8)
    order = rng.permutation(4)
    assert (fewest_moves.rebalance(load[order], old[order], 8) == new[order]).all()
    # renamed: another order of equal ranks may win, but the promise is the same
    ranks = rng.permutation(8)
    renamed = old.reshape(4, 8, 4)[:, ranks].reshape(4, 32)
    assert (balancedness(load, fewest_moves.rebalance(load, renamed, 8), 8) >= balancedness(load, hosts(load, old, 8), 8) * (1 - 1e-8)).all()


@pytest.mark.parametrize("ranks,local,experts", [(1, 6, 5), (4, 1, 3), (3, 5, 4), (4, 8, 30)])
def test_keep_slots(rng, ranks, local, experts):
    """The contents of each rank stay, and as many slots keep theirs as the contents allow."""
    old, new = rng.integers(0, experts, (2, 5, ranks * local))
    got = fewest_moves.keep_slots(new, old, ranks)
    for a, b, c in zip(*(m.reshape(-1, local) for m in (old, new, got)), strict=True):
        assert Counter(b) == Counter(c)
        assert (a == c).sum() == (Counter(a) & Counter(b)).total()


@pytest.mark.parametrize("ranks,local,experts", [(1, 6, 5), (4, 1, 3), (3, 5, 4), (4, 8, 30)])
def test_moved(rng, ranks, local, experts):
    old, new = rng.integers(0, experts, (2, 5, ranks * local))
    expected = [
        sum(new[n, s] not in old[n, s // local * local : (s // local + 1) * local] for s in range(ranks * local)) for n in range(5)
    ]
    assert fewest_moves.moved(old, new, ranks).tolist() == expected
    assert not fewest_moves.moved(old, rng.permuted(old.reshape(-1, local), axis=1).reshape(old.shape), ranks).any()


def test_refusals():
    load, old = np.ones((2, 4)), np.tile(maps.initial(4, 2), (2, 1))
    for slack in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="slack"):
            fewest_moves.rebalance(load, old, 3, slack)
    with pytest.raises(ValueError, match="old: layer 1: expert 3 is nowhere"):
        fewest_moves.rebalance(load, np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 1]]), 3)
    with pytest.raises(ValueError, match="old: other layers"):
        fewest_moves.rebalance(load[:1], old, 3)
    with pytest.raises(ValueError, match="ranks: 4 does not divide 6"):
        fewest_moves.rebalance(load, old, 4)
