# SPDX-License-Identifier: Apache-2.0
"""Recorded loads: written, read, refused; replayed against windows by hand."""

import numpy as np
import pytest

from deepseek_v41_plugin.eplb import maps, simulate
from deepseek_v41_plugin.eplb.balance import balancedness
from deepseek_v41_plugin.eplb.fewest_moves import keep_slots, moved
from deepseek_v41_plugin.eplb.moves import moves
from deepseek_v41_plugin.eplb.placement import place
from tests.eplb.fleet import random_maps


def random_loads(rng, windows=4, layers=2, experts=12):
    return rng.integers(0, 1000, (windows, layers, experts))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
@pytest.mark.parametrize("name", ["", "a talk about bread"])
@pytest.mark.parametrize("fields", [(), ("ranks",), ("redundant", "expert_bytes"), tuple(simulate.LEAST)])
def test_what_is_saved_is_loaded(rng, tmp_path, dtype, name, fields):
    loads = random_loads(rng).astype(dtype)
    numbers = {field: int(rng.integers(simulate.LEAST[field], 1000)) for field in fields}
    simulate.save(tmp_path / "recorded", loads, name=name, **numbers)  # numpy would add .npz
    got = simulate.load(tmp_path / "recorded")
    assert got.loads.dtype == np.int64 and (got.loads == loads).all() and got.name == name
    assert {field: getattr(got, field) for field in simulate.LEAST} == dict.fromkeys(simulate.LEAST) | numbers


def test_a_file_with_loads_alone(rng, tmp_path):
    loads = random_loads(rng)
    np.savez(tmp_path / "x.npz", loads=loads)
    got = simulate.load(tmp_path / "x.npz")
    assert (got.loads == loads).all() and (got.name, got.ranks, got.redundant, got.expert_bytes) == ("", None, None, None)


BAD = [
    (np.ones((2, 3), int), "loads: shape"),
    (np.ones((0, 2, 3), int), "loads: .*none of them 0"),
    (np.ones((1, 2, 3)), "loads: float64"),
    (np.array([[[1, -2]]]), "loads: -2 is negative"),
]


@pytest.mark.parametrize("loads,text", BAD)
def test_loads_that_are_none(tmp_path, loads, text):
    with pytest.raises(ValueError, match=text):
        simulate.save(tmp_path / "x.npz", loads)
    assert not (tmp_path / "x.npz").exists()
    np.savez(tmp_path / "x.npz", loads=loads)
    with pytest.raises(ValueError, match=f"x.npz: {text}"):
        simulate.load(tmp_path / "x.npz")


@pytest.mark.parametrize("field,value,text", [
    ("ranks", 0, "0. Give 1 or more"),
    ("redundant", -1, "-1. Give 0 or more"),
    ("expert_bytes", -8, "-8. Give 0 or more"),
    ("ranks", 2.0, r"float64, shape \[\]. Give one whole number"),
    ("redundant", True, r"bool, shape \[\]. Give one whole number"),
    ("expert_bytes", [1, 2], r"int64, shape \[2\]. Give one whole number"),
])
def test_numbers_that_are_none(rng, tmp_path, field, value, text):
    loads = random_loads(rng)
    with pytest.raises(ValueError, match=f"^{field}: {text}"):
        simulate.save(tmp_path / "x.npz", loads, **{field: value})
    assert not (tmp_path / "x.npz").exists()
    np.savez(tmp_path / "x.npz", loads=loads, **{field: value})
    with pytest.raises(ValueError, match=f"x.npz: {field}: {text}"):
        simulate.load(tmp_path / "x.npz")


def test_files_that_are_none(rng, tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(OSError):
        simulate.load(path)
    np.savez(path, load=random_loads(rng))
    with pytest.raises(ValueError, match="x.npz: loads: not there"):
        simulate.load(path)
    np.savez(path, loads=np.array([[[{}]]], object))
    with pytest.raises(ValueError, match="x.npz: "):
        simulate.load(path)
    with path.open("wb") as file:
        np.save(file, random_loads(rng))
    with pytest.raises(ValueError, match="x.npz: not an .npz file"):
        simulate.load(path)
    simulate.save(path, random_loads(rng))
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="x.npz: "):
            simulate.load(path)


@pytest.mark.parametrize("ranks,redundant", [(4, 4), (2, 12)])  # 2 ranks that both hold all: new and old are no symmetric pair
@pytest.mark.parametrize("name", simulate.POLICIES)
def test_a_window_is_judged_with_the_map_of_the_one_before(rng, name, ranks, redundant):
    loads = random_loads(rng)
    loads[..., 3] *= 20
    got = simulate.replay(loads, ranks, redundant, simulate.POLICIES[name])
    now = np.tile(maps.initial(12, redundant), (2, 1))
    for n in range(4):
        if n and name != "none":
            old, physical = now, 12 + redundant
            now = keep_slots(place(loads[n - 1], physical, ranks), old, ranks) if name == "place" else simulate.rebalance(loads[n - 1], old, ranks)
            assert got.moved[n].tolist() == moved(old, now, ranks).tolist()
            assert got.crossed[n].tolist() == sent(old, now, ranks)
        assert got.balancedness[n] == pytest.approx(balancedness(loads[n], now, ranks))
    for count in (got.moved, got.crossed):
        assert not count[0].any() and (name != "none" or not count.any())


def sent(old, new, ranks):
    """Pushes to other ranks, of each layer."""
    return [sum(peer != rank for rank, own in enumerate(moves(*maps, ranks)) for _, peer, _ in own.pushes) for maps in zip(old, new)]


def test_an_expert_crosses_once_to_a_rank(run_rng):
    new = np.array([[3, 3, 2, 0, 1, 2]])  # after 0 1 2, 3 0 1: rank 0 gains expert 3 in two slots, rank 1 gains 2
    got = simulate.replay(np.ones((2, 1, 4), int), 2, 2, lambda *_: new)
    assert got.moved.tolist() == [[0], [3]] and got.crossed.tolist() == [[0], [2]]
    ranks, local = run_rng.randrange(1, 5), run_rng.randrange(2, 6)
    old, new = (random_maps(run_rng, 3, 1 + ranks * local // 2, ranks * local) for _ in range(2))
    assert simulate.crossing(old, new, ranks).tolist() == sent(old, new, ranks)


def test_a_load_that_stays_is_balanced_from_the_second_window_on(rng):
    loads = np.tile(rng.pareto(1, (1, 3, 24)) * 1000 + 1, (4, 1, 1)).astype(int)
    for name in ("place", "fewest_moves"):
        got = simulate.replay(loads, 8, 8, simulate.POLICIES[name])
        assert (got.balancedness[1:] == got.balancedness[1]).all()
        if name == "fewest_moves":
            assert (got.balancedness[1] >= got.balancedness[0]).all(), "it never makes a layer worse"
        assert not got.moved[2:].any()


def test_ranks_that_do_not_fit(rng):
    with pytest.raises(ValueError, match="redundant: 12 experts and 3 more cannot be cut over 8 ranks. Choose 4"):
        simulate.replay(random_loads(rng), 8, 3, simulate.POLICIES["none"])


def test_uniform_routing_draws_as_many_tokens_evenly(rng):
    loads = random_loads(rng) * 1000
    even = simulate.uniform(loads, rng)
    assert even.shape == loads.shape and (even.sum(2) == loads.sum(2)).all()
    mean = loads.sum(2, keepdims=True) / 12
    assert (abs(even - mean) <= 8 * np.sqrt(mean)).all()  # 8 standard deviations
    assert (even != mean).any()
