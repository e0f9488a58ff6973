# SPDX-License-Identifier: Apache-2.0
"""The step's budget: exhaustive search, saturation, idling, and never under the rate without drafts."""

import numpy as np
import pytest

from deepseek_v41_plugin.kernels import verification as op
from deepseek_v41_plugin.verification import Curve, StepCosts, plan
from deepseek_v41_plugin.verification.budget import survival

FLAT = Curve(((1, 10.0), (100_000, 10.0)))
FREE = Curve(((1, 1e-9), (100_000, 1e-9)))


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def curve(rng, most):
    """Random and rising: floors, knees, steps of padded graphs."""
    sizes = np.unique(np.concatenate(([1], rng.integers(2, most, int(rng.integers(1, 6))))))
    cost = np.cumsum(rng.exponential(1.0, len(sizes)) * rng.choice([0.01, 1, 5], len(sizes))) + rng.exponential(5.0)
    pads = tuple(np.unique(rng.integers(1, most, 4)).tolist()) if rng.random() < 0.4 else ()
    return Curve(tuple(zip(sizes.tolist(), cost.tolist(), strict=True)), pads)


def case(rng, requests=None, k=None):
    requests = int(rng.integers(1, 301)) if requests is None else requests
    k = int(rng.integers(1, 9)) if k is None else k
    costs = StepCosts(curve(rng, 2 * requests * k + 3), curve(rng, requests + 2), float(rng.choice([0, 0.2])))
    confidence = rng.beta(0.9, 0.4, (requests, k))
    drafts = rng.integers(0, k + 1, requests)
    base = requests + int(rng.integers(0, 50))
    return costs, confidence, drafts, {"base_rows": base, "sampling": int(rng.integers(0, requests + 1))}


def rate_of(costs, confidence, drafts, base, sampling, n, draft):
    """Expected tokens a ms when the best n drafts are verified, from the definition."""
    chance = survival(confidence)
    slots = sorted((chance[r, i] for r, d in enumerate(drafts) for i in range(d)), reverse=True)
    cost = float(costs.verify.at(base + n)) + (costs.trim_ms if 0 < n < len(slots) else 0)
    return (sampling + sum(slots[:n])) / (cost + (costs.draft_ms(int((drafts > 0).sum())) if draft else 0))


def test_no_budget_has_a_higher_rate(rng):
    drafted = 0
    for _ in range(150):
        costs, confidence, drafts, rows = case(rng, int(rng.integers(1, 9)), int(rng.integers(1, 6)))
        base, sampling = rows["base_rows"], rows["sampling"]
        got = plan(costs, confidence, drafts, **rows)
        total = int(drafts.sum())
        rates = [rate_of(costs, confidence, drafts, base, sampling, n, True) for n in range(total + 1)]
        plain = sampling / float(costs.verify.at(base))
        assert got.draft == (total > 0 and max(rates) > plain)
        assert got.plain_rate == pytest.approx(plain, rel=1e-12)
        assert got.tokens / got.cost_ms == pytest.approx(
            rate_of(costs, confidence, drafts, base, sampling, got.budget, got.draft), rel=1e-12
        )
        if got.draft:
            drafted += 1
            assert got.rate == pytest.approx(max(rates), rel=1e-12)
            assert rates[got.budget] == pytest.approx(max(rates), rel=1e-9)
    assert drafted > 10


def test_never_slower_than_without_drafts(rng):
    """Of any step, whatever lies ready; and of a step that drafts, its draft pass included, once it repeats."""
    for _ in range(150):
        costs, confidence, drafts, rows = case(rng)
        potential = np.full(len(drafts), confidence.shape[1])
        got = plan(costs, confidence, drafts, potential=potential, **rows)
        own = got.cost_ms - (costs.draft_ms(len(drafts)) if got.draft else 0)
        assert got.tokens / own >= got.plain_rate * (1 - 1e-9)
        assert got.rate >= got.plain_rate
        assert 0 <= got.budget <= drafts.sum()
        again = plan(costs, confidence, potential, **rows)
        assert again.draft == got.draft
        if again.draft:
            assert again.tokens / again.cost_ms >= again.plain_rate * (1 - 1e-9)


def test_saturated_means_none(rng):
    """Where a row costs as much as it takes to make a token without drafts, no draft is worth it."""
    for _ in range(40):
        requests, k = int(rng.integers(1, 301)), int(rng.integers(1, 9))
        linear = Curve(((1, 0.5), (10_000, 5_000.0)))
        confidence = rng.uniform(0, 0.999, (requests, k))
        drafts = rng.integers(0, k + 1, requests)
        got = plan(StepCosts(linear, FREE), confidence, drafts, base_rows=requests, sampling=requests)
        assert (got.budget, got.draft) == (0, False) and got.rate == got.plain_rate


def test_idle_means_all(rng):
    for _ in range(40):
        requests, k = int(rng.integers(1, 301)), int(rng.integers(1, 9))
        confidence = rng.beta(0.5, 0.5, (requests, k)) * (rng.random((requests, k)) < 0.9)
        drafts = rng.integers(0, k + 1, requests)
        costs = StepCosts(FLAT, FREE, float(rng.choice([0, 0.3])))
        got = plan(costs, confidence, drafts, base_rows=requests, sampling=requests)
        assert got.budget == drafts.sum()


def test_rows_of_a_padded_graph_are_given_away():
    padded = StepCosts(Curve(((8, 1.0), (16, 100.0)), pads=(8, 16)), FREE)
    got = plan(padded, np.array([[0.9, 0.0, 0.0], [0.0, 0.5, 0.5]] * 2), np.full(4, 3), base_rows=4, sampling=4)
    assert got.budget == 4  # two have a chance; two more rows are free, a third is padded to 16


def test_drafts_that_lie_ready_are_used_though_no_more_are_made():
    costs = StepCosts(Curve(((1, 10.0), (1000, 10.5))), Curve(((1, 500.0),)))
    got = plan(costs, np.full((4, 5), 0.8), np.full(4, 5), base_rows=4, sampling=4)
    assert (got.budget, got.draft) == (20, False)


def test_drafting_starts_again_from_potential_drafts():
    costs = StepCosts(FLAT, FREE)
    got = plan(costs, np.full((4, 5), 0.8), np.zeros(4, int), potential=np.full(4, 5), base_rows=4, sampling=4)
    assert (got.budget, got.draft) == (0, True)


def test_a_host_that_cannot_leave_the_draft_out_still_gets_budget_0():
    costs = StepCosts(Curve(((1, 0.5), (10_000, 5_000.0))), Curve(((1, 5.0), (300, 5.0))))
    got = plan(costs, np.full((200, 5), 0.3), np.full(200, 5), base_rows=200, sampling=200, always_draft=True)
    assert (got.budget, got.draft) == (0, True) and got.rate == got.plain_rate


def test_the_limit_holds(rng):
    for _ in range(30):
        costs, confidence, drafts, rows = case(rng)
        limit = int(rng.integers(0, drafts.sum() + 1))
        assert plan(costs, confidence, drafts, limit=limit, **rows).budget <= limit
    got = plan(StepCosts(FLAT, FREE), np.full((9, 5), 0.9), np.full(9, 5), base_rows=9, sampling=9, limit=7)
    assert got.budget == 7


def test_the_order_of_requests_does_not_matter(rng):
    for _ in range(30):
        costs, confidence, drafts, rows = case(rng)
        order = rng.permutation(len(drafts))
        assert plan(costs, confidence, drafts, **rows) == plan(costs, confidence[order], drafts[order], **rows)


def test_nothing_to_decide():
    costs = StepCosts(FLAT, FREE)
    empty = plan(costs, np.zeros((0, 5)), np.zeros(0, int), base_rows=0, sampling=0)
    assert (empty.budget, empty.draft, empty.tokens) == (0, False, 0.0)
    prefill = plan(costs, np.full((2, 5), 0.9), np.zeros(2, int), base_rows=512, sampling=0)
    assert (prefill.budget, prefill.draft) == (0, False)


def test_the_budget_is_spent_whole_by_the_device(rng):
    import torch

    for _ in range(20):
        costs, confidence, drafts, rows = case(rng)
        got = plan(costs, confidence, drafts, **rows)
        fresh = torch.tensor(rng.beta(0.9, 0.4, confidence.shape), dtype=torch.float32)
        assert int(op.lengths(fresh, torch.tensor(drafts), got.budget).sum()) == got.budget
