# SPDX-License-Identifier: Apache-2.0
"""Rebalancers in real processes and threads: every byte of every slot, in every step."""

import threading
import time

import numpy as np
import pytest

from deepseek_v41_plugin.eplb.commit import InDoubt
from deepseek_v41_plugin.eplb.rebalancer import Rebalancer
from tests.eplb.band import LAYERS, Band
from tests.eplb.fleet import Fleet

FOREVER = 600


@pytest.mark.parametrize("ranks,wait", [(2, False), (4, False), (3, True)])
def test_processes(run_rng, ranks, wait):
    with Band(ranks, run_rng.getrandbits(32), wait) as band:
        seen = set()
        for generation in range(1, 4):
            band.play("begin")
            if wait:  # all of it has happened in this step
                assert all(not band.said[rank][0] and band.said[rank][1] == generation for rank in range(ranks))
            band.until_idle()
            assert all(band.said[rank][1:3] == [generation, 0] for rank in range(ranks))
            seen.add(band.said[0][3])
        assert len(seen) == 3


@pytest.fixture
def alone(run_rng):
    """One rank of one, with its own thread."""
    fleet = Fleet(run_rng, ranks=1, experts=2)
    rebalancer = fleet.all[0].rebalancer
    rebalancer._thread = None
    yield fleet, rebalancer
    rebalancer.close(FOREVER)


def finish(rebalancer: Rebalancer) -> None:
    while rebalancer.busy:
        rebalancer.step()


def test_one_rank(alone):
    fleet, rebalancer = alone
    assert not rebalancer.busy and rebalancer._thread is None
    assert rebalancer.begin(lambda: np.ones((fleet.layers, fleet.experts)))
    assert rebalancer.busy
    assert not rebalancer.begin(np.ones((fleet.layers, fleet.experts))), "a second time in one step"
    finish(rebalancer)
    assert rebalancer.stats.finished == 1, rebalancer.stats.last_problem
    fleet.all[0].steps = rebalancer._gate.steps
    fleet.check(fleet.all[0])
    assert [kind for kind, _ in fleet.all[0].events] == ["begin", "plan", *["layer"] * rebalancer.stats.layers, "finished"]
    assert rebalancer.close(FOREVER) and rebalancer.stats.state == "off"
    assert not rebalancer.begin(np.ones((fleet.layers, fleet.experts))) and not rebalancer.busy


def test_an_idle_step_takes_no_lock(alone):
    _, rebalancer = alone
    rebalancer._gate.changed = None
    rebalancer.step()
    assert rebalancer._gate.steps == 1
    rebalancer._gate.changed = threading.Condition()


def test_a_log_that_fails_changes_nothing(alone):
    fleet, rebalancer = alone

    def fail(kind, **fields):
        raise OSError("disk full")

    rebalancer._on_event = fail
    rebalancer.begin(np.ones((fleet.layers, fleet.experts)))
    finish(rebalancer)
    assert rebalancer.stats.finished == 1 and "disk full" in rebalancer.stats.last_problem


def test_the_thread_that_pushes_enters_first(alone):
    """A transport sets the thread's device there."""
    fleet, rebalancer = alone
    entered, done = [], threading.Event()
    rebalancer._peers.enter = lambda: entered.append(threading.current_thread())
    rebalancer.begin(lambda: done.set() or np.ones((fleet.layers, fleet.experts)))
    assert done.wait(FOREVER)
    assert entered == [rebalancer._thread]


def test_close_does_not_wait_for_a_device_that_hangs(alone):
    fleet, rebalancer = alone
    called, go = threading.Event(), threading.Event()

    def load():
        called.set()
        go.wait(FOREVER)
        return np.ones((fleet.layers, fleet.experts))

    rebalancer.begin(load)
    assert called.wait(FOREVER)
    assert not rebalancer.close(0.01)
    go.set()
    assert rebalancer.close(FOREVER)


def test_in_doubt(alone, run_rng):
    """The store goes between report and decision: the main thread is told, neither held for ever nor let on."""
    fleet, rebalancer = alone
    rank = fleet.all[0]
    publish = rank.worker.board.publish

    def last_words(key, value):
        publish(key, value)
        rank.store.lost = "step" in key

    rank.worker.board.publish = last_words
    rebalancer.begin(np.ones((fleet.layers, fleet.experts)))
    with pytest.raises(InDoubt, match="restart"):
        end = time.monotonic() + FOREVER
        while time.monotonic() < end:
            rebalancer.step()
    assert rebalancer.stats.state == "off" and "does not answer" in rebalancer.stats.last_problem
    assert not rebalancer.begin(np.ones((fleet.layers, fleet.experts))) and rebalancer.close(FOREVER)


@pytest.mark.parametrize("change,match", [
    (dict(weights=[[]]), "weights: 1 layers"),
    (dict(physical_to_logical=np.zeros((LAYERS, 7), np.int64) + 1), "physical_to_logical: layer 0: expert 0 is nowhere"),
    (dict(ranks=5), "cut over 5"),
    (dict(rank=1), "board: it is that of rank 0 of 1"),
    (dict(margin=0), "margin: 0 steps"),
])
def test_refusals(alone, change, match):
    fleet, rebalancer = alone
    rank = fleet.all[0]
    given = dict(
        name="model", weights=rank.weights, physical_to_logical=rank.maps, rank=0, ranks=1, board=rank.worker.board,
        peers=rank.buffers, policy=fleet.policy, switch=lambda layer, row: None)
    if "physical_to_logical" in change:
        given["weights"] = [rank.weights[0]] * LAYERS
    with pytest.raises(ValueError, match=match):
        Rebalancer(**{**given, **change})
