# SPDX-License-Identifier: Apache-2.0
"""The simulator: the published table's shape, replay of a log, and a saturated machine."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from deepseek_v41_plugin.verification import Curve, StepCosts

PATH = Path(__file__).resolve().parents[2] / "bench" / "simulate_verification.py"
spec = importlib.util.spec_from_file_location("simulate_verification", PATH)
sim = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sim)


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def test_the_shape_of_the_published_table(rng):
    found = [sim.simulate(sim.default_costs(), *sim.synthetic(rng, 250, n), 2, sim.OVERHEAD) for n in (16, 48, 96)]
    gain = [row["scheduled_percent"] for row in found]
    assert -3 < gain[0] < 0.5 < gain[1] < 6.5 < gain[2] < 16
    fewer = [row["fewer_verified_percent"] for row in found]
    assert fewer == sorted(fewer) and 12 < fewer[0] and fewer[-1] < 46
    for row in found:
        assert 2.7 < row["length_fixed"] < 3.9
        assert 0 < row["length_fixed"] - row["length_scheduled"] < 0.25
        assert row["bypass_percent"] > -0.7


def test_no_draft_is_verified_twice_or_beyond_what_was_made(rng):
    confidence, accepted = sim.synthetic(rng, 60, 20)
    all_free = StepCosts(Curve(((1, 5.0), (10_000, 5.0))), Curve(((1, 1.0), (300, 1.0))))
    got = sim.scheduled(all_free, confidence, accepted, 1, 0.0)
    assert got["verified"] == 60 * 20 * 5 and got["tokens"] == 60 * 20 + accepted.sum()
    assert got["ms"] == pytest.approx(60 * 6.0)


def test_a_saturated_machine_decodes_without_drafts(rng):
    """Each row costs what a token earns: after the first step, which finds drafts ready, none are made."""
    confidence, accepted = sim.synthetic(rng, 60, 200)
    costs = StepCosts(Curve(((1, 0.1), (10_000, 1000.0))), Curve(((1, 1.0), (300, 4.0))))
    got = sim.scheduled(costs, confidence, accepted, 2, 0.0)
    assert got["verified"] == 0 and got["tokens"] == 60 * 200
    assert got["ms"] == pytest.approx(60 * float(costs.verify.at(200)))


def test_a_recorded_log_is_replayed(rng, tmp_path):
    confidence, accepted = sim.synthetic(rng, 40, 6)
    logits = np.log(confidence / (1 - confidence))
    np.savez(tmp_path / "log.npz", logits=2 * logits, accepted=accepted)
    got, counts = sim.recorded(tmp_path / "log.npz", 2.0, rng, 11)
    assert got.shape == (40, 11, 5) and counts.shape == (40, 11)
    apart = np.abs(got.reshape(-1, 1, 5) - confidence.reshape(1, -1, 5)).max(2)
    assert ((apart < 1e-9) & (counts.reshape(-1, 1) == accepted.reshape(1, -1))).any(1).all()
    assert np.isfinite(sim.simulate(sim.default_costs(), got, counts, 1, 0.1)["scheduled_percent"])
