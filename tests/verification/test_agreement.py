# SPDX-License-Identifier: Apache-2.0
"""All ranks choose alike; confidences are read at a fixed age; the group's choice by exhaustive search."""

import itertools

import numpy as np
import pytest

from deepseek_v41_plugin.verification import Curve, LastKnown, StepCosts, Tally, agree, offer, plan
from deepseek_v41_plugin.verification.agreement import BINS, WIDTH
from deepseek_v41_plugin.verification.budget import survival


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def costs(rng):
    knee = int(rng.integers(2, 200))
    verify = Curve(((1, 5.0), (knee, 5.0 + float(rng.random())), (knee + 100, 6.0 + float(rng.exponential(20)))))
    draft = Curve(((1, float(rng.uniform(0.01, 4))), (300, 12.0)))
    return StepCosts(verify, draft, float(rng.choice([0, 0.1])))


def rank(rng, requests, k):
    """Confidences whose survival is a whole number of bins, so that the offer loses nothing."""
    chance = -np.sort(-rng.integers(0, BINS + 1, (requests, k)), axis=1) / BINS
    before = np.concatenate((np.ones((requests, 1)), chance[:, :-1]), axis=1)
    confidence = np.divide(chance, before, out=np.zeros_like(chance), where=before > 0)
    return confidence, rng.integers(0, k + 1, requests), requests + int(rng.integers(0, 9))


def offers_of(ranks):
    return [offer(c, d, base_rows=b, sampling=len(d), potential=np.full(len(d), c.shape[1])) for c, d, b in ranks]


def test_local_order_does_not_matter_and_ranks_permute(rng):
    for _ in range(30):
        shared = costs(rng)
        ranks = [rank(rng, int(rng.integers(0, 80)), 5) for _ in range(int(rng.integers(1, 9)))]
        sent = offers_of(ranks)
        assert all(o.shape == (WIDTH,) and o.dtype == np.int64 for o in sent)
        got = agree(shared, sent)
        shuffled = []
        for c, d, b in ranks:
            order = rng.permutation(len(d))
            shuffled.append((c[order], d[order], b))
        assert agree(shared, offers_of(shuffled)) == got
        order = rng.permutation(len(ranks))
        other = agree(shared, [sent[i] for i in order])
        assert other.budgets == tuple(got.budgets[i] for i in order) and other.rate == got.rate
        for budget, (_, d, b) in zip(got.budgets, ranks, strict=True):
            assert 0 <= budget <= d.sum() and b + budget <= got.rows


def test_a_group_of_one_plans_as_one_rank(rng):
    for _ in range(40):
        shared, (c, d, b) = costs(rng), rank(rng, int(rng.integers(1, 60)), 5)
        potential = np.full(len(d), 5)
        alone = plan(shared, c, d, base_rows=b, sampling=len(d), potential=potential)
        group = agree(shared, offers_of([(c, d, b)]))
        assert group.draft == alone.draft and group.rate == pytest.approx(alone.rate)
        value = survival(c)[np.arange(5) < d[:, None]]
        gain = np.concatenate(([0], np.cumsum(np.sort(value)[::-1])))
        cost = shared.verify_ms(b, int(d.sum()))
        score = [gain[n] - alone.rate * cost[n] for n in (group.budgets[0], alone.budget)]
        assert score[0] == pytest.approx(score[1], abs=1e-9)


def test_no_choice_of_budgets_has_a_higher_rate(rng):
    for _ in range(40):
        shared = costs(rng)
        ranks = [rank(rng, int(rng.integers(1, 4)), 2) for _ in range(3)]
        ranks = [(c, np.full(len(d), 2), b) for c, d, b in ranks]
        got = agree(shared, offers_of(ranks))
        gains = [np.concatenate(([0], np.cumsum(np.sort(survival(c).ravel())[::-1]))) for c, _, _ in ranks]
        sampling = sum(len(d) for _, d, _ in ranks)
        draft_ms = shared.draft_ms(max(len(d) for _, d, _ in ranks))
        highest = 0.0
        for budgets in itertools.product(*(range(len(g)) for g in gains)):
            trimmed = any(0 < n < len(g) - 1 for n, g in zip(budgets, gains, strict=True))
            rows = max(b + n for n, (_, _, b) in zip(budgets, ranks, strict=True))
            cost = float(shared.verify.at(rows)) + shared.trim_ms * trimmed + draft_ms
            highest = max(highest, (sampling + sum(g[n] for n, g in zip(budgets, gains, strict=True))) / cost)
        # With a cost of trimming the group fills ranks evenly rather than trying which ones to leave untrimmed.
        slack = shared.trim_ms / 5.0
        if got.draft:
            assert highest * (1 - slack) - 1e-12 <= got.rate <= highest * (1 + 1e-12)
        else:
            assert highest * (1 - slack) <= got.plain_rate + 1e-12


def test_the_group_is_never_slower_than_without_drafts(rng):
    for _ in range(60):
        shared = costs(rng)
        ranks = [rank(rng, int(rng.integers(0, 40)), 5) for _ in range(4)]
        got = agree(shared, offers_of(ranks))
        assert got.rate >= got.plain_rate
        counted = [np.rint(survival(c) * BINS)[np.arange(5) < d[:, None]] / BINS for c, d, _ in ranks]
        gain = sum(np.sort(v)[::-1][:n].sum() for v, n in zip(counted, got.budgets, strict=True))
        rows = max(b + n for (_, _, b), n in zip(ranks, got.budgets, strict=True))
        trimmed = any(0 < n < d.sum() for (_, d, _), n in zip(ranks, got.budgets, strict=True))
        sampling = sum(len(d) for _, d, _ in ranks)
        cost = float(shared.verify.at(rows)) + shared.trim_ms * trimmed
        assert (sampling + gain) / cost >= got.plain_rate * (1 - 1e-9)


def test_an_empty_group():
    shared = StepCosts(Curve(((1, 1.0),)), Curve(((1, 1.0),)))
    none = offer(np.zeros((0, 5)), np.zeros(0, int), base_rows=0, sampling=0)
    got = agree(shared, [none, none])
    assert got.budgets == (0, 0) and not got.draft


def test_confidences_are_read_at_their_age_however_early_they_arrive(rng):
    k, slots, age = 3, 6, 2
    early, late = (LastKnown(slots, np.full(k, 0.5), age) for _ in range(2))
    records = [
        (rng.choice(slots, int(rng.integers(0, slots)), replace=False), rng.random((slots, k))) for _ in range(12)
    ]
    everyone = np.arange(slots)
    put = 0
    for step, (at, value) in enumerate(records):
        if rng.random() < 0.3:
            slot = int(rng.integers(slots))
            early.reset(slot), late.reset(slot)
        early.put(step, at, early.owners(at), value[: len(at)])
        while put <= step - age:  # the slow rank has only what it must have
            at, value = records[put]
            late.put(put, at, owners[put], value[: len(at)])
            put += 1
        owners = {} if step == 0 else owners
        owners[step] = late.owners(records[step][0])
        assert np.array_equal(early.read(step, everyone), late.read(step, everyone))


def test_a_new_request_has_the_prior_and_no_record_of_the_old_one():
    known = LastKnown(2, np.array([0.7, 0.6]), age=1)
    owners = known.owners(np.array([0, 1]))
    known.reset(0)
    known.put(0, np.array([0, 1]), owners, np.array([[0.1, 0.1], [0.2, 0.2]]))
    assert np.allclose(known.read(1, np.array([0, 1])), [[0.7, 0.6], [0.2, 0.2]])


def test_a_missing_record_is_waited_for_not_guessed():
    known = LastKnown(1, np.array([0.5]), age=1)
    assert known.read(0, np.array([0])).tolist() == [[0.5]]
    with pytest.raises(RuntimeError, match="step 1 needs the confidences of step 0"):
        known.read(1, np.array([0]))
    with pytest.raises(ValueError, match="0 is due"):
        known.put(1, np.array([0]), np.array([0]), np.array([[0.5]]))
    with pytest.raises(ValueError, match="age"):
        LastKnown(1, np.array([0.5]), age=0)


def test_tally(rng):
    tally = Tally(5)
    seen = []
    for _ in range(10):
        drafts = rng.integers(0, 6, 20)
        verified = rng.integers(0, drafts + 1)
        accepted = rng.integers(0, verified + 1)
        tally.add(int(verified.sum()), drafts, verified, accepted)
        seen.append((drafts, verified, accepted))
    drafts, verified, accepted = (np.concatenate(x) for x in zip(*seen, strict=True))
    assert (tally.drafted, tally.verified, tally.accepted) == (drafts.sum(), verified.sum(), accepted.sum())
    assert tally.saved_rows == drafts.sum() - verified.sum() and tally.budget == verified.sum() and tally.steps == 10
    assert tally.accepted_by_position.tolist() == [(accepted > i).sum() for i in range(5)]
    assert tally.verified_by_position.tolist() == [(verified > i).sum() for i in range(5)]
