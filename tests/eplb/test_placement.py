# SPDX-License-Identifier: Apache-2.0
"""Placement: valid maps, never less balanced than vLLM's policy, and the optimum where it can be counted out."""

import itertools

import numpy as np
import pytest
import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

from deepseek_v41_plugin.eplb import balance, maps, placement

# experts, redundant, ranks
SIZES = [(384, 0, 4), (384, 32, 32), (384, 64, 64), (384, 0, 128), (128, 0, 16), (128, 64, 64), (128, 0, 128), (24, 8, 8), (7, 2, 3), (5, 0, 1), (1, 3, 4), (3, 45, 6)]
KINDS = ("uniform", "skewed", "one", "equal", "floats", "sparse")


def random_load(rng: np.random.Generator, kind: str, layers: int, experts: int) -> np.ndarray:
    """Below 2 ** 24, where the host's float32 is exact."""
    if kind == "uniform":
        return rng.integers(0, 100_000, (layers, experts))
    if kind == "skewed":
        return np.minimum(rng.pareto(rng.uniform(0.5, 2), (layers, experts)) * 1000, 1.5e7).astype(np.int64)
    if kind == "one":
        load = np.zeros((layers, experts), np.int64)
        load[np.arange(layers), rng.integers(0, experts, layers)] = rng.integers(1, 1 << 23)
        return load
    if kind == "equal":
        return np.full((layers, experts), rng.integers(1, 1000))
    if kind == "sparse":
        return rng.integers(0, 1000, (layers, experts)) * (rng.random((layers, experts)) < 0.2)
    return rng.random((layers, experts), np.float32)


def hosts(load: np.ndarray, physical: int, ranks: int, groups: int = 1, nodes: int = 1) -> np.ndarray:
    return DefaultEplbPolicy.rebalance_experts(torch.from_numpy(load), physical, groups, nodes, ranks).numpy()


def no_worse(load, ours, theirs, ranks):
    return (balance.balancedness(load, ours, ranks) >= balance.balancedness(load, theirs, ranks) * (1 - 1e-9)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts,redundant,ranks", SIZES)
def test_valid_and_never_worse_than_the_host(rng, kind, experts, redundant, ranks):
    load = random_load(rng, kind, 3, experts)
    got = placement.place(load, experts + redundant, ranks)
    assert got.shape == (3, experts + redundant) and got.dtype == np.int64
    assert maps.problem(got, experts, ranks) is None
    theirs = hosts(load, experts + redundant, ranks)
    assert no_worse(load, got, theirs, ranks)
    plain = placement.greedy(placement.checked(load, experts + redundant, ranks), experts + redundant, ranks)
    loads = (np.sort(balance.rank_loads(load, m, ranks), axis=1) for m in (plain, theirs))
    if load.sum(1).all():
        assert np.allclose(*loads, rtol=1e-9), "the published policy, before exchanges"


@pytest.mark.parametrize("experts,redundant,ranks,groups,nodes", [(24, 8, 8, 4, 2), (64, 32, 16, 8, 4), (64, 0, 16, 8, 8), (48, 16, 8, 2, 2), (12, 4, 4, 12, 4)])
def test_hierarchical(rng, experts, redundant, ranks, groups, nodes):
    load = rng.permuted(np.arange(1, 3 * experts + 1) ** 2).reshape(3, experts)  # no two groups alike
    got = placement.place(load, experts + redundant, ranks, groups, nodes)
    assert maps.problem(got, experts, ranks) is None
    assert no_worse(load, got, hosts(load, experts + redundant, ranks, groups, nodes), ranks)
    node_of = got.reshape(3, nodes, -1)
    for layer in range(3):
        homes = [set(row // (experts // groups)) for row in node_of[layer]]
        assert all(a.isdisjoint(b) for a, b in itertools.combinations(homes, 2)), "a group lies on one node"
        assert all(len(h) == groups // nodes for h in homes)


@pytest.mark.parametrize("groups,nodes", [(3, 2), (1, 4), (6, 1)])
def test_without_a_whole_number_of_groups_a_node_they_are_ignored(rng, groups, nodes):
    load = rng.integers(0, 100, (2, 12))
    assert (placement.place(load, 16, 4, groups, nodes) == placement.place(load, 16, 4)).all()


def least_peak(load: np.ndarray, physical: int, ranks: int) -> float:
    """The smallest largest rank load of all maps of one layer, counted out."""
    experts, local = len(load), physical // ranks
    best = np.inf
    for extra in itertools.combinations_with_replacement(range(experts), physical - experts):
        replicas = np.bincount([*range(experts), *extra], minlength=experts)
        items = [load[e] / replicas[e] for e in range(experts) for _ in range(replicas[e])]

        def fill(at, totals, room):
            nonlocal best
            if max(totals) >= best:
                return
            if at == len(items):
                best = max(totals)
                return
            for rank in range(ranks):
                if room[rank]:
                    fill(at + 1, [t + items[at] * (r == rank) for r, t in enumerate(totals)], [n - (r == rank) for r, n in enumerate(room)])

        fill(0, [0.0] * ranks, [local] * ranks)
    return best


@pytest.mark.parametrize("experts,physical,ranks,bound", [(4, 4, 2, 1), (6, 6, 3, 1.2), (5, 6, 2, 1.3), (4, 6, 2, 1.5), (3, 6, 3, 1.6), (3, 4, 4, 1)])
def test_against_the_optimum(rng, experts, physical, ranks, bound):
    """Never below it, and near it.  The worst there is: c replicas of the only hot expert on R ranks, some with two:
    ceil(c / R) R / c times the optimum, which is 4/3 of 3 on 2 and 3/2 of 4 on 3."""
    for _ in range(4):
        load = rng.integers(1, 50, experts)
        best = least_peak(load, physical, ranks)
        got = balance.rank_loads(load[None], placement.place(load[None], physical, ranks), ranks).max()
        assert best * (1 - 1e-9) <= got <= best * bound * (1 + 1e-9)


def test_exchanges_find_what_the_published_policy_misses():
    """8, 7 | 6, 5, 4 into 3 slots each: heaviest first gives 8 + 5 + 4 against 7 + 6 + 1; 16 against 15 is possible."""
    load = np.array([[8, 7, 6, 5, 4, 1]])
    plain = placement.greedy(placement.checked(load, 6, 2), 6, 2)
    assert balance.rank_loads(load, plain, 2).max() == 17
    assert balance.rank_loads(load, placement.place(load, 6, 2), 2).max() == 16 == least_peak(load[0], 6, 2)


def test_replicas_are_as_small_as_can_be(rng):
    for _ in range(5):
        load = rng.integers(1, 60, (1, 4))
        _, replicas = placement.replicate(load.astype(float), 8)
        counts = (c for c in itertools.product(range(1, 6), repeat=4) if sum(c) == 8)
        assert (load[0] / replicas[0]).max() == pytest.approx(min((load[0] / np.array(c)).max() for c in counts))


def test_a_layer_without_load_spreads_its_replicas():
    got = placement.place(np.zeros((2, 6), np.int64), 12, 3)
    assert (np.sort(got, axis=1) == np.repeat(np.arange(6), 2)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_alone_and_the_scale_does_not_matter(rng, kind):
    load = random_load(rng, kind, 4, 24)
    got = placement.place(load, 32, 8)
    assert (placement.place(load.copy(order="F"), 32, 8) == got).all()
    assert (placement.place(load.astype(np.float64) * 8, 32, 8) == got).all()
    order = rng.permutation(4)
    assert (placement.place(load[order], 32, 8) == got[order]).all()


def test_one_slot_a_rank_and_no_redundancy_moves_nothing(rng):
    assert (placement.place(rng.integers(0, 99, (2, 16)), 16, 16) == np.arange(16)).all()


@pytest.mark.parametrize(
    "load,physical,ranks,groups,nodes,text",
    [
        (np.ones(4), 4, 2, 1, 1, "load: 1 dimensions"),
        (np.array([[1, -1]]), 2, 1, 1, 1, "load: negative"),
        (np.array([[1, np.nan]]), 2, 1, 1, 1, "load: negative or not finite"),
        (np.ones((1, 4)), 3, 1, 1, 1, "physical: 3 slots are too few for 4"),
        (np.ones((1, 4)), 6, 4, 1, 1, "ranks: 4 does not divide 6"),
        (np.ones((1, 4)), 4, 0, 1, 1, "ranks: 0 does not divide 4"),
        (np.ones((1, 4)), 4, 2, 3, 1, "groups: 3 does not divide 4"),
        (np.ones((1, 4)), 4, 4, 1, 3, "nodes: 3 does not divide 4"),
    ],
)
def test_refusals(load, physical, ranks, groups, nodes, text):
    with pytest.raises(ValueError, match=text):
        placement.place(load, physical, ranks, groups, nodes)
