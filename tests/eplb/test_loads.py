# SPDX-License-Identifier: Apache-2.0
"""Counts of slots become loads of experts, whatever the maps were, over the right steps."""

import numpy as np
import pytest
import torch

from deepseek_v41_plugin.eplb.loads import Loads
from deepseek_v41_plugin.eplb.schedule import Schedule
from tests.eplb.test_maps import random_map


def test_loads_follow_the_maps(rng):
    """Two thirds of the steps count, some are dropped, the map changes: the sum is that of the rows' experts."""
    layers, experts, redundant, intervals = 3, 6, 2, 2
    loads = Loads(layers, experts, experts + redundant, torch.device("cpu"), intervals)
    history = []
    for _ in range(5):
        want = np.zeros((layers, experts), np.int64)
        for _ in range(int(rng.integers(1, 6))):
            now = random_map(rng, layers, experts, redundant)
            counts = rng.integers(0, 50, (layers, experts + redundant))
            loads.counts += torch.from_numpy(counts).int()
            if rng.random() < 0.3:
                loads.drop()
                continue
            loads.add(torch.from_numpy(now))
            np.add.at(want, (np.arange(layers)[:, None], now), counts)
        history.append(want)
        assert np.array_equal(loads.window().numpy(), sum(history[-intervals:]))
        loads.next_interval()
    assert not loads.counts.any()


@pytest.mark.parametrize("window,interval", [(1000, 3000), (3, 10), (10, 10), (25, 10), (1, 1), (5, 1), (4, 3)])
def test_schedule(window, interval):
    schedule, recorded, begun = Schedule(window, interval), [], []
    first = max(1, interval // 4)
    for step in range(first + 4 * interval):
        recorded.append(schedule.recording)
        if schedule.tick():
            begun.append(step)
    assert begun == [first - 1 + n * interval for n in range(5)]
    for last, at in zip(begun, begun[1:]):
        counted = sum(recorded[last + 1 : at + 1])
        assert counted == min(window, interval)
        assert recorded[at]  # the last steps count, not the first ones
    assert (schedule.intervals - 1) * interval < window <= schedule.intervals * interval
