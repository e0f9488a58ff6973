# SPDX-License-Identifier: Apache-2.0
"""The protocol under every interruption at every point, and under random ones: weights, maps and that it ends."""

import random

import numpy as np
import pytest

from tests.eplb.fleet import PATIENCE, TIMEOUT, Fleet, random_maps

FAULTS = ("stalled", "late", "asleep", "dead", "lost", "closed", "superseded", "superseded on one", "failed flush")


def turn(fleet: Fleet) -> None:
    """Everybody acts once."""
    for rank in fleet.rng.sample(fleet.all, fleet.ranks):
        fleet.work(rank)
        fleet.step(rank)
    fleet.clock += 0.01


def begin_together(fleet: Fleet) -> None:
    """All main threads wish for a rebalance in the same step, a new one."""
    target = 1 + max((rank.steps for rank in fleet.living()), default=0)
    for _ in range(3000):
        if all(rank.steps == rank.gate.steps == target for rank in fleet.living()):
            break
        for rank in fleet.living():
            fleet.work(rank)
            if rank.steps < target:
                fleet.step(rank)
        fleet.clock += 0.1
    else:
        raise AssertionError("the main threads do not come together")
    for rank in fleet.living():
        fleet.begin(rank)


def finishes(fleet: Fleet) -> None:
    """A further rebalance works, to the last layer: nothing is stopped for ever."""
    fleet.planned = random_maps(fleet.rng, fleet.layers, fleet.experts, fleet.ranks * fleet.local)
    before = [rank.worker.stats.finished for rank in fleet.all]
    begin_together(fleet)
    fleet.settle()
    assert [rank.worker.stats.finished for rank in fleet.all] == [n + 1 for n in before]
    for rank in fleet.all:
        assert np.array_equal(rank.rebalancer.maps, fleet.planned)
    generations = {key.split("/")[2] for key in fleet.data}
    assert len(generations) == 1, "old messages are left"


def after(fleet: Fleet) -> None:
    """What holds after any fault: it ends, the survivors agree, and where all live the next rebalance works."""
    fleet.settle()
    for rank in fleet.all:
        rank.buffers.fail = False
    living = fleet.living()
    for rank in living:
        for _ in range(2):
            turn(fleet)
        assert np.array_equal(rank.rebalancer.maps, living[0].rebalancer.maps)
    if all(rank.working() and not rank.worker.closing and not rank.store.lost for rank in fleet.all):
        finishes(fleet)
    else:
        begin_together(fleet)  # fails, and that ends too
        fleet.settle()


def strike(fleet: Fleet, fault: str, rank) -> None:
    """What goes wrong on `rank` now."""
    if fault == "stalled":  # its worker stands still for a moment that is long for the main threads
        for _ in range(30):
            for other in fleet.rng.sample(fleet.all, fleet.ranks):
                fleet.step(other)
                if other is not rank:
                    fleet.work(other)
    elif fault in ("late", "asleep"):  # its worker stands still, beyond any patience; its main thread too, if asleep
        for _ in range(40):
            for other in fleet.all:
                if other is not rank:
                    fleet.work(other)
                if other is not rank or fault == "late":
                    fleet.step(other)
            fleet.clock += 3 * TIMEOUT / 40 if fault == "late" else TIMEOUT
    elif fault == "dead":
        rank.alive = False
    elif fault == "lost":
        rank.store.lost = True
    elif fault == "closed":
        rank.worker.closing = True
    elif fault == "superseded":
        begin_together(fleet)
    elif fault == "superseded on one":
        fleet.begin(rank)
    elif fault == "failed flush":
        rank.buffers.fail = True


@pytest.mark.parametrize("wait", [False, True])
def test_quiet(run_rng, wait):
    fleet = Fleet(run_rng, ranks=3, layers=3, wait=wait)
    for _ in range(3):
        finishes(fleet)
    assert all(rank.worker.stats.failures == rank.worker.stats.watchdog == 0 for rank in fleet.all)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_point(run_rng, fault, wait):
    """One fault on one of two ranks, before the n-th turn, for all n until the rebalance is over by itself."""
    seed = run_rng.getrandbits(64)
    for victim in (0, 1):
        for n in range(1000):
            fleet = Fleet(random.Random(f"{seed} {n}"), wait=wait)
            begin_together(fleet)
            for _ in range(n):
                turn(fleet)
            if over := not fleet.busy():
                break
            strike(fleet, fault, fleet.all[victim])
            after(fleet)
        assert over and n > 3


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_order_and_any_faults(run_rng, ranks, wait):
    """Ranks that do not wish in the same step, as they are to, have equal maps all the same unless they `wait`: a change
    is then made in the very step of the wishes."""
    faults = [fault for fault in FAULTS if not wait or fault != "superseded on one"]
    for _ in range(40):
        rng = random.Random(run_rng.getrandbits(64))
        fleet = Fleet(rng, ranks=ranks, layers=rng.choice((1, 2, 3)), wait=wait)
        harm = rng.choice((0, 0.002, 0.01, 0.03))
        pace = [rng.choice((1, 1, 3, 20)) for _ in range(2 * ranks)]  # some are faster than others
        begins = {rng.randrange(40): rng.random() for _ in range(rng.randrange(1, 6))}
        for _ in range(rng.randrange(50, 600)):
            actor = rng.choices(range(2 * ranks), pace)[0]
            rank = fleet.all[actor // 2]
            if actor % 2:
                fleet.work(rank)
            elif fleet.step(rank) and rank.steps in begins and (wait or begins[rank.steps] > 0.3 or rng.random() < 0.5):
                fleet.begin(rank)
            if rng.random() < harm:
                fault = rng.choice(faults)
                strike(fleet, "stalled" if fault == "superseded" or rng.random() < 0.5 else fault, rank)
            fleet.clock += rng.choice((0, 0, 0, 0.01, 0.1, PATIENCE / 3 if harm else 0))
            if rng.random() < 0.02:
                fleet.planned = rng.choice((None, None, ValueError("no"), np.zeros((1, 1)), np.zeros_like(fleet.maps[0])))
        after(fleet)


def test_a_newer_rebalance_goes_on_behind_the_last_change(run_rng):
    """A wish ends the running rebalance behind the layer at hand; layers at the end get their turn all the same."""
    fleet = Fleet(run_rng, ranks=2, layers=4)
    fleet.planned = np.roll(fleet.maps[0], 1, axis=1)  # all layers change
    begin_together(fleet)
    while not all(rank.worker.stats.layers for rank in fleet.all):
        turn(fleet)
    fleet.planned = np.roll(fleet.maps[0], 2, axis=1)
    begin_together(fleet)
    fleet.settle()
    for rank in fleet.all:
        stats = rank.worker.stats
        assert (stats.generations, stats.finished, stats.superseded, stats.failures) == (2, 1, 1, 0)
        changed = [fields["layer"] for kind, fields in rank.events if kind == "layer"]
        first = stats.layers - 4
        assert 1 <= first < 4 and changed == [*range(first), *range(first, 4), *range(first)]
        assert np.array_equal(rank.rebalancer.maps, fleet.planned)
