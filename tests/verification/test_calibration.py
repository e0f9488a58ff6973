# SPDX-License-Identifier: Apache-2.0
"""Temperatures found again from simulated accepts, with and without scheduling.

Bound: the maximum-likelihood slope b = 1 / tau is normal around the truth with the reported standard
error.  |z| <= 6.5 fails by chance once in 1e10 positions; a run looks at 19.
"""

import numpy as np
import pytest
import torch

from deepseek_v41_plugin.kernels import verification as op
from deepseek_v41_plugin.verification import Calibration, calibrated
from deepseek_v41_plugin.verification.calibration import HIGHEST, LOWEST, cross_entropy, fit, observed, slope

Z = 6.5


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def blocks(rng, n, temperature):
    """(logits [n, k], how many drafts would be accepted if all were verified [n])."""
    k = len(temperature)
    logits = rng.normal(1.2, 2.0, (n, k))
    hit = rng.random((n, k)) < 1 / (1 + np.exp(-logits / temperature))
    return logits, np.cumprod(hit, axis=1).sum(1)


def test_known_temperatures_are_found(rng):
    for k in (1, 5, 8):
        truth = rng.uniform(0.5, 2.5, k)
        logits, accepted = blocks(rng, 30_000, truth)
        got = fit(logits, np.full(len(logits), k), accepted)
        assert len(got.temperature) == k
        z = (1 / np.array(got.temperature) - 1 / truth) / np.array(got.error)
        assert np.abs(z).max() <= Z
        assert np.array(got.error)[0] < 0.03  # sharp enough to mean something


def test_scheduling_does_not_bias_the_fit(rng):
    """Only drafts that a tight budget admits are verified; the temperatures are still found."""
    truth = rng.uniform(0.6, 2.0, 5)
    logits, would = blocks(rng, 40_000, truth)
    confidence = calibrated(torch.tensor(logits), torch.ones(5))
    verified = np.zeros(len(logits), dtype=int)
    for begin in range(0, len(logits), 200):
        part = slice(begin, begin + 200)
        verified[part] = op.lengths(confidence[part], torch.full((200,), 5), 500).numpy()
    got = fit(logits, verified, np.minimum(would, verified))
    enough = np.array(got.error) > 0
    assert enough.all()
    assert (np.abs(1 / np.array(got.temperature) - 1 / truth) / got.error).max() <= Z


def test_counting_what_follows_a_rejection_would_be_wrong(rng):
    seen, label = observed(np.array([5, 3, 0, 5]), np.array([2, 3, 0, 5]), 5)
    assert seen.sum(1).tolist() == [3, 3, 0, 5] and label.sum(1).tolist() == [2, 3, 0, 5]
    with pytest.raises(ValueError, match="accepted"):
        observed(np.array([2]), np.array([3]), 5)
    with pytest.raises(ValueError, match="accepted"):
        observed(np.array([6]), np.array([3]), 5)


def test_the_fit_lowers_the_loss_and_nothing_near_is_lower(rng):
    truth = np.array([0.5, 1.5, 2.5])
    logits, accepted = blocks(rng, 5_000, truth)
    verified = np.full(len(logits), 3)
    got = fit(logits, verified, accepted)
    loss = cross_entropy(logits, verified, accepted, got)
    assert loss < cross_entropy(logits, verified, accepted, Calibration.none(3))
    for i in range(3):
        for factor in (0.99, 1.01):
            other = list(got.temperature)
            other[i] *= factor
            near = Calibration(tuple(other), got.error, got.count)
            assert cross_entropy(logits, verified, accepted, near) >= loss


def test_the_order_of_the_log_hardly_matters(rng):
    logits, accepted = blocks(rng, 2_000, np.array([0.8, 1.4]))
    order = rng.permutation(len(logits))
    both = [fit(logits[o], np.full(len(o), 2), accepted[o]) for o in (np.arange(len(order)), order)]
    assert np.allclose(both[0].temperature, both[1].temperature, rtol=1e-9)
    assert fit(logits, np.full(len(logits), 2), accepted) == both[0]


def test_too_few_observations_use_all_positions_then_none(rng):
    logits, accepted = blocks(rng, 2_000, np.array([1.7, 1.7, 1.7]))
    verified = np.minimum(np.full(len(logits), 3), np.where(np.arange(len(logits)) < 50, 3, 2))
    got = fit(logits, verified, np.minimum(accepted, verified))
    assert got.error[2] == 0 and got.count[2] < 200 and 1.3 < got.temperature[2] < 2.2
    few = fit(logits[:20], verified[:20], accepted[:20])
    assert few.temperature == (1.0, 1.0, 1.0)
    assert fit(np.zeros((0, 3)), np.zeros(0, int), np.zeros(0, int), enough=0).temperature == (1.0, 1.0, 1.0)


def test_separable_contradicting_and_empty_labels_end_at_a_bound(rng):
    logits = rng.normal(0, 2, 500)
    assert slope(logits, logits > 0)[0] == pytest.approx(1 / LOWEST)
    assert slope(logits, logits < 0)[0] == pytest.approx(1 / HIGHEST)
    assert slope(np.zeros(500), logits > 0) == (1.0, 0.0)
    assert slope(np.array([1e4, -1e4, 3.0]), np.array([False, True, True]))[0] >= 1 / HIGHEST


def test_calibrated_on_the_device(rng):
    by = Calibration((0.5, 2.0), (0.0, 0.0), (0, 0))
    logits = torch.tensor(rng.normal(0, 2, (7, 2)))
    got = calibrated(logits.float(), by.inverse())
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), torch.sigmoid(logits / torch.tensor([0.5, 2.0])), atol=1e-6)


@pytest.mark.parametrize("bad", [(), (0.01,), (50.0,), ("1",), (float("nan"),)])
def test_bad_temperatures_are_refused(bad):
    with pytest.raises(ValueError, match="calibration"):
        Calibration(bad, (0.0,) * len(bad), (0,) * len(bad))
