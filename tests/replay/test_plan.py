# SPDX-License-Identifier: Apache-2.0
"""The plan against a brute-force simulation of hosts, the formula of key ranges, and its being vectorised."""

import gc
import sys
from collections import Counter

import numpy as np
import pytest

from deepseek_v41_plugin.replay import MODES, Policy, ReplayError, plan
from tests.replay.simulation import Simulation

FIELDS = ("window_start", "decoder_start", "replay_end", "dropped")


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def one(policy, first=0, rows=1, prefill=1, replay_start=0, whole=False):
    """The plan of a single request, as ints by field."""
    got = plan(policy, first_position=[first], rows=[rows], prefill=[prefill], replay_start=[replay_start], whole=[whole])
    return {name: int(getattr(got, name)[0]) for name in FIELDS}


# (window, drafts, keep_tokens, block size): the least keep_tokens and more; hits at every even offset with blocks of 2.
SHAPES = [(8, 5, 14, 2), (8, 5, 14, 4), (6, 2, 12, 2), (4, 0, 5, 2), (16, 5, 30, 8)]


@pytest.mark.parametrize(("window", "drafts", "keep", "block_size"), SHAPES)
def test_simulated_hosts(rng, window, drafts, keep, block_size):
    simulation = Simulation(rng, Policy(window, "mask", keep, drafts), block_size, longest=4 * keep)
    wanted = ["hit", "hit of a later life", "chunk ends in a replay", "dropped", "narrowed", "decode beside prefill"]
    for _ in range(10):  # once in 1e6 runs a case is not met in the first round
        for _ in range(120):
            simulation.step()
        if not (missing := [name for name in wanted if not simulation.seen[name]]):
            break
    assert not missing, (missing, simulation.seen)


def test_the_simulation_meets_every_case(rng):
    seen = Counter()
    wanted = ["preempted in a replay", "several hits in a step", "whole after a hit", *(f"rolled back {n}" for n in range(1, 7))]
    for n in range(40):
        simulation = Simulation(rng, Policy(8, "mask", 14, 5), 2, longest=48, preempt=0.2)
        for _ in range(80):
            simulation.step()
        seen += simulation.seen
        if n >= 3 and not (missing := [name for name in wanted if not seen[name]]):
            break
    assert not missing, (missing, seen)


@pytest.mark.parametrize("mode", MODES)
def test_every_hit_and_chunk_of_a_prompt(mode):
    """All hits and chunks of all prompts of up to 40 tokens, at a window of 8 and 12 kept tokens."""
    window, keep = 8, 12
    policy = Policy(window, mode, keep, 3)
    cases = [
        (hit, first, end, prefill)
        for prefill in range(1, 41)
        for hit in [0, *range(window + 2, prefill, 2)]
        for first in range(max(hit - window, 0), prefill)
        for end in range(first + 1, prefill + 1)
    ]
    hit, first, end, prefill = np.array(cases).T
    start = np.maximum(hit - window, 0)
    got = plan(policy, first_position=first, rows=end - first, prefill=prefill, replay_start=start, whole=np.zeros(len(hit), bool))
    decoder = start if mode == "off" else np.where(prefill - keep > start, prefill - keep, start)
    dropped = np.zeros_like(hit)
    if mode == "compact":
        dropped = np.array([sum(position < d for position in range(f, e)) for f, e, d in zip(first, end, decoder, strict=True)])
    assert np.array_equal(got.window_start, start) and np.array_equal(got.decoder_start, decoder)
    assert np.array_equal(got.replay_end, hit) and np.array_equal(got.dropped, dropped)


def test_the_released_sizes():
    """Window 128, keep 140: a prompt of 1000 after a hit of 512, in the chunk that ends it."""
    asked = dict(first=384, rows=616, prefill=1000, replay_start=384)
    assert one(Policy(128), **asked) == dict(window_start=384, decoder_start=384, replay_end=512, dropped=0)
    assert one(Policy(128, "mask"), **asked) == dict(window_start=384, decoder_start=860, replay_end=512, dropped=0)
    assert one(Policy(128, "compact"), **asked) == dict(window_start=384, decoder_start=860, replay_end=512, dropped=476)
    assert one(Policy(128, "compact"), **asked, whole=True)["dropped"] == 0
    assert one(Policy(128, "compact"), first=1000, rows=6, prefill=1000)["dropped"] == 0
    assert one(Policy(128, "compact"), first=0, rows=100, prefill=1000)["dropped"] == 100
    assert one(Policy(128, "compact"), first=0, rows=140, prefill=140)["decoder_start"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_many_requests_are_one_batch(rng, mode):
    """As many interpreted lines and calls for 1000 hits as for one, and each request's own plan."""
    policy, n = Policy(128, mode, 140, 5), 1000
    prefill = rng.integers(150, 3000, n)
    start = np.maximum((rng.integers(129, prefill) // 2 * 2) - 128, 2)
    first = rng.integers(start, prefill)
    arrays = dict(
        first_position=first, rows=rng.integers(1, prefill - first + 1), prefill=prefill, replay_start=start,
        whole=rng.random(n) < 0.2,
    )
    before = {name: value.copy() for name, value in arrays.items()}

    def lines(count):
        total = 0

        def trace(frame, event, arg):
            nonlocal total
            total += 1
            return trace

        kept, part = sys.gettrace(), {name: value[:count] for name, value in arrays.items()}
        gc.disable()  # what it calls would be counted
        sys.settrace(trace)
        try:
            planned = plan(policy, **part)
        finally:
            sys.settrace(kept)
            gc.enable()
        return total, planned

    (few, _), (many, planned) = lines(1), lines(n)
    assert few == many
    for i in rng.integers(0, n, 40):
        alone = plan(policy, **{name: value[i : i + 1] for name, value in arrays.items()})
        assert all(getattr(alone, name)[0] == getattr(planned, name)[i] for name in FIELDS)
    for name in FIELDS:
        assert getattr(planned, name).dtype == np.int64 and getattr(planned, name).shape == (n,)
        getattr(planned, name)[:] = -7
    assert all(np.array_equal(arrays[name], before[name]) for name in arrays), "plan changed or handed out its arguments"


def test_narrow_integers_do_not_overflow():
    top = np.array([2**31 - 200], dtype=np.int32)
    got = plan(
        Policy(256, "compact", 300), first_position=top, rows=np.array([5], np.int32), prefill=top + 100,
        replay_start=top, whole=np.array([False]),
    )
    assert got.replay_end[0] == 2**31 - 200 + 256 and got.window_start[0] == top[0]


def test_an_empty_step():
    none = np.zeros(0, np.int64)
    got = plan(Policy(8, "compact", 20), first_position=none, rows=none, prefill=none, replay_start=none, whole=none)
    assert all(getattr(got, name).shape == (0,) for name in FIELDS)


@pytest.mark.parametrize(("window", "drafts"), [(128, 5), (8, 0), (1, 6)])
def test_the_least_keep_tokens(window, drafts):
    least = window + drafts + 1
    for mode in ("mask", "compact"):
        Policy(window, mode, least, drafts)
        with pytest.raises(ReplayError, match=f"at least {least}"):
            Policy(window, mode, least - 1, drafts)
    Policy(window, "off", 1, drafts)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"decoder": "on"}, "decoder_replay: 'on'"),
        ({"decoder": None}, "decoder_replay: None"),
        ({"keep_tokens": 140.0}, "keep_tokens: 140.0"),
        ({"keep_tokens": True}, "keep_tokens: True"),
        ({"keep_tokens": 0, "decoder": "off"}, "keep_tokens: 0"),
        ({"keep_tokens": 1 << 31}, "keep_tokens: 2147483648 is not an integer from 1 to 2147483647"),
        ({"drafts": -1}, "drafts: -1"),
        ({"drafts": "5"}, "drafts: '5'"),
        ({"window": 0}, "window: 0"),
    ],
)
def test_refusals(options, match):
    with pytest.raises(ReplayError, match=match):
        Policy(**{"window": 128, "decoder": "mask"} | options)
