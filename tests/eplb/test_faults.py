# SPDX-License-Identifier: Apache-2.0
"""Faults of real processes and threads: who dies, who is late, what the survivors say and do."""

import numpy as np
import pytest

from tests.eplb.band import Band, hang_and_go_on
from tests.eplb.fleet import Fleet

# Where a rank dies -> what the others may miss of it.  (Behind a change they may have finished, if it was the last.)
DEATHS = {
    "load": ("loads: rank {} did not begin",),
    "push": ("rank {} did not finish its pushes", "rank {} is not ready"),
    "report": ("rank {} did not report its step",),
    "switch": ("rank {} is not ready", "rank {} did not finish its pushes", "rank {} did not report its step"),
}


def test_a_killed_process(run_rng):
    """Any rank, at any point: the others keep equal maps and right weights in every step, and name it."""
    point, victim = run_rng.choice([*DEATHS, "policy"]), run_rng.randrange(3)
    if point == "policy":
        victim = 0
    with Band(3, run_rng.getrandbits(32), die={victim: point}) as band:
        band.play("begin")
        while victim in band.ranks and any(band.said[rank][0] for rank in band.ranks):
            band.play()
        if victim in band.ranks:  # nothing to push in this rebalance
            return
        band.play("jump")
        band.until_idle()
        failed = [rank for rank in band.ranks if band.said[rank][2]]
        texts = {band.said[rank][4] for rank in failed}
        wanted = ("rank 0 did not answer",) if point == "policy" else DEATHS[point]
        if victim == 0:
            wanted += ("rank 0 did not answer",)
        assert all(any(text.format(victim) in said for text in wanted) for said in texts), texts
        assert len(failed) == 2 or point == "switch"
        band.play("begin")  # the next one ends too, and says why
        band.until_idle()
        assert all(f"loads: rank {victim} did not begin" in band.said[rank][4] for rank in band.ranks)


def sleep(fleet: Fleet) -> None:
    """No main thread steps for some days."""
    for _ in range(300):
        for rank in fleet.all:
            fleet.work(rank)
        fleet.clock += 3600


def test_a_sleeping_server_is_not_late(run_rng):
    """Main threads stop where one rank waits for another's: before its `begin`, and before its change. It all goes on later."""
    fleet = Fleet(run_rng, ranks=3, layers=3)
    fleet.planned = np.roll(fleet.maps[0], 1, axis=1)  # all layers change
    first, *others = run_rng.sample(fleet.all, 3)
    fleet.begin(first)
    sleep(fleet)
    assert first.worker.stats.failures == 0
    for rank in others:
        fleet.begin(rank)
    while first.worker.stats.layers == 0 or first.gate.due is not None:
        for rank in fleet.all:
            fleet.work(rank)
        for rank in others:
            if rank.gate.due is None or rank.steps + 1 < rank.gate.due.step:
                fleet.step(rank)
        fleet.step(first)
    sleep(fleet)
    assert first.worker.stats.layers == 1 and all(rank.gate.due is not None for rank in others)
    fleet.settle()
    assert all(rank.worker.stats.finished == 1 and rank.worker.stats.failures == 0 for rank in fleet.all)


def test_a_missed_change_is_made_later(run_rng):
    """A main thread that does not come to its change, while the others wait for its buffer, is not waited for for ever."""
    fleet = Fleet(run_rng, ranks=2, layers=3)
    fleet.planned = np.roll(fleet.maps[0], 1, axis=1)  # all layers change
    for rank in fleet.all:
        fleet.begin(rank)
    one, other = fleet.all
    while one.worker.stats.layers == 0 or one.gate.due is not None:
        for rank in fleet.all:
            fleet.work(rank)
        fleet.step(one)
        if other.gate.due is None or other.steps + 1 < other.gate.due.step:
            fleet.step(other)
    # `other` stands before its change; its peer has made it and would go on.
    while not one.worker.stats.failures:
        fleet.work(one)
        fleet.work(other)
        one.gate.steps += 1  # it does not heed its peer: dummy steps, say
        fleet.clock += 1
    assert "rank 1 is not ready within 30 s" in one.worker.stats.last_problem and "layer" in one.worker.stats.last_problem
    assert one.worker.stats.watchdog == 1 and [kind for kind, _ in one.events].count("watchdog") == 1
    assert other.gate.due is not None and other.worker.stats.layers == 1
    one.steps = one.gate.steps = other.steps
    while other.gate.due is not None:
        fleet.step(other)
    assert np.array_equal(one.rebalancer.maps, other.rebalancer.maps)


def test_a_late_rank_and_then_not(run_rng):
    victim = run_rng.randrange(3)
    with Band(3, run_rng.getrandbits(32), hang=victim) as band:
        hang_and_go_on(band, victim)


@pytest.mark.parametrize("planned,text", [
    (ValueError("no idea"), "loads: rank 0: the policy failed: no idea"),
    (np.zeros((2, 6), np.int64), "the policy failed: layer 0: expert 1 is nowhere"),
    (np.zeros((2, 5), np.int64), "instead of (2, 6)"),
])
def test_a_policy_that_fails(run_rng, planned, text):
    fleet = Fleet(run_rng)
    fleet.planned = planned
    for rank in fleet.all:
        fleet.begin(rank)
    fleet.settle()
    for rank in fleet.all:
        assert rank.worker.stats.failures == 1 and text in rank.worker.stats.last_problem
        assert rank.events[-1][0] == "abandoned"


def test_a_load_that_fails(run_rng):
    fleet = Fleet(run_rng)
    fleet.begin(fleet.all[0])
    fleet.all[1].rebalancer.begin(np.ones((2, 3)))
    fleet.settle()
    assert all("rank 1: its load failed: load: its shape is (2, 3)" in rank.worker.stats.last_problem for rank in fleet.all)


def test_other_maps_are_refused(run_rng):
    fleet = Fleet(run_rng)
    fleet.all[1].worker.maps[0] = fleet.all[1].worker.maps[0][::-1].copy()
    fleet.all[1].worker.maps[1] = np.roll(fleet.all[1].worker.maps[1], 1)
    for rank in fleet.all:
        fleet.begin(rank)
    fleet.settle()
    assert all("rank 1 has other maps or another margin than rank 0" in rank.worker.stats.last_problem for rank in fleet.all)
