# SPDX-License-Identifier: Apache-2.0
"""Per-request lengths on the device: properties under random inputs, and brute force over small batches."""

import itertools

import numpy as np
import pytest
import torch

from deepseek_v41_plugin.kernels import verification as op


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def batch(rng, requests=None, k=None, ties=False, dtype=torch.float64):
    """(confidence [R, k], drafts int32 [R], all drafts): some requests without drafts, zeros and ones among them."""
    requests = int(rng.integers(1, 301)) if requests is None else requests
    k = int(rng.integers(1, 9)) if k is None else k
    confidence = rng.integers(0, 4, (requests, k)) / 3 if ties else rng.beta(0.9, 0.4, (requests, k))
    confidence[rng.random((requests, k)) < 0.05] = 1.0
    confidence[rng.random((requests, k)) < 0.05] = 0.0
    drafts = rng.integers(0, k + 1, requests) * (rng.random(requests) < 0.8)
    return torch.tensor(confidence, dtype=dtype), torch.tensor(drafts, dtype=torch.int32), int(drafts.sum())


def brute(confidence, drafts, budget):
    """The most expected accepted drafts of any prefixes within the budget."""
    chance = np.cumprod(confidence.numpy(), axis=1)
    choices = itertools.product(*(range(int(d) + 1) for d in drafts))
    return max(sum(c[:n].sum() for c, n in zip(chance, p, strict=True)) for p in choices if sum(p) <= budget)


def test_exactly_the_budget_and_only_prefixes_of_what_there_is(rng):
    for ties in [False, True] * 20:
        confidence, drafts, total = batch(rng, ties=ties)
        for budget in {0, 1, total // 3, total, total + 7, int(rng.integers(0, total + 1))}:
            lengths = op.lengths(confidence, drafts, budget)
            assert lengths.dtype == torch.int32 and lengths.shape == drafts.shape
            assert int(lengths.sum()) == min(budget, total)
            assert bool(((lengths >= 0) & (lengths <= drafts)).all())
            if budget == 0:
                assert not lengths.any()
            if budget >= total:
                assert torch.equal(lengths, drafts)


def test_a_tensor_budget_is_an_int_budget(rng):
    for _ in range(20):
        confidence, drafts, total = batch(rng)
        budget = int(rng.integers(0, total + 3))
        want = op.lengths(confidence, drafts, budget)
        for form in (torch.tensor(budget), torch.tensor([budget], dtype=torch.int32)):
            assert torch.equal(op.lengths(confidence, drafts, form), want)


def test_nothing_gains_more_than_the_choice(rng):
    for ties in [False, True] * 40:
        requests, k = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        confidence, drafts, total = batch(rng, requests, k, ties)
        chance = np.cumprod(confidence.numpy(), axis=1)
        for budget in range(total + 2):
            lengths = op.lengths(confidence, drafts, budget).tolist()
            got = sum(c[:n].sum() for c, n in zip(chance, lengths, strict=True))
            assert got == pytest.approx(brute(confidence, drafts, budget), abs=1e-12)


def test_ties_go_to_the_earlier_position_then_the_lower_request(rng):
    for _ in range(40):
        confidence, drafts, total = batch(rng, int(rng.integers(1, 30)), ties=True)
        chance = op.survival(confidence).tolist()
        slots = [(-chance[r][i], i, r) for r, d in enumerate(drafts.tolist()) for i in range(d)]
        budget = int(rng.integers(0, total + 1))
        want = [0] * len(drafts)
        for _, _, r in sorted(slots)[:budget]:
            want[r] += 1
        assert op.lengths(confidence, drafts, budget).tolist() == want


def test_raising_a_request_never_shortens_it(rng):
    for ties in [False, True] * 40:
        confidence, drafts, total = batch(rng, ties=ties)
        budget = int(rng.integers(0, total + 1))
        r = int(rng.integers(len(drafts)))
        raised = confidence.clone()
        lift = torch.tensor(rng.random(confidence.shape[1]) * (rng.random(confidence.shape[1]) < 0.7))
        raised[r] += (1 - raised[r]) * lift
        before, after = op.lengths(confidence, drafts, budget), op.lengths(raised, drafts, budget)
        assert after[r] >= before[r]
        others = torch.arange(len(drafts)) != r
        assert bool((after[others] <= before[others]).all())


def test_a_larger_budget_never_shortens_anyone(rng):
    for ties in (False, True):
        confidence, drafts, total = batch(rng, 40, ties=ties)
        previous = torch.zeros_like(drafts)
        for budget in range(total + 1):
            lengths = op.lengths(confidence, drafts, budget)
            assert int((lengths - previous).sum()) == (budget > 0) and bool((lengths >= previous).all())
            previous = lengths


def test_the_order_of_requests_does_not_matter_where_confidences_differ(rng):
    for _ in range(30):
        requests, k = int(rng.integers(1, 301)), int(rng.integers(1, 9))
        confidence = torch.tensor(rng.uniform(0.05, 0.95, (requests, k)))
        drafts = torch.tensor(rng.integers(0, k + 1, requests), dtype=torch.int32)
        chance = op.survival(confidence).flatten()
        assert len(chance.unique()) == len(chance)
        order = torch.tensor(rng.permutation(requests))
        budget = int(rng.integers(0, int(drafts.sum()) + 1))
        want = op.lengths(confidence, drafts, budget)[order]
        assert torch.equal(op.lengths(confidence[order], drafts[order], budget), want)


def test_float32_chooses_as_float64_up_to_what_float32_cannot_tell_apart(rng):
    for _ in range(30):
        confidence, drafts, total = batch(rng, dtype=torch.float32)
        budget = int(rng.integers(0, total + 1))
        chance = op.survival(confidence.double())
        taken = torch.nn.functional.pad(chance.cumsum(1), (1, 0))
        value = [
            taken.gather(1, op.lengths(c, drafts, budget)[:, None].long()).sum().item()
            for c in (confidence, confidence.double())
        ]
        assert value[0] <= value[1] + 1e-12
        assert value[1] - value[0] <= budget * 8 * 2.0**-24 * 2


def test_survival_never_rises_in_any_dtype(rng):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        confidence = torch.tensor(rng.uniform(0.97, 1.0, (300, 8))).to(dtype)
        chance = op.survival(confidence)
        assert chance.dtype == dtype and bool((chance.diff(dim=1) <= 0).all())


def test_nan_and_values_outside_are_no_winners():
    confidence = torch.tensor([[float("nan"), 1.0], [0.5, 0.5], [-3.0, 9.0], [float("inf"), 0.1]])
    drafts = torch.tensor([2, 2, 2, 2])
    assert op.lengths(confidence, drafts, 4).tolist() == [0, 2, 0, 2]


def test_no_requests():
    lengths = op.lengths(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int32), 3)
    assert lengths.shape == (0,) and lengths.dtype == torch.int32
