# SPDX-License-Identifier: Apache-2.0
"""One decision for a group of ranks: a pure function of what they exchange.

Data-parallel ranks with shared experts run in lockstep: the step lasts as long as the rank with the
most rows.  So the group picks a common number of rows; each rank fills up to it with its own best drafts.

Each rank sends an `offer`, a fixed-size vector of integers that holds no order, time or address, and
calls `agree` on all offers in rank order.  Sums are over integers, so they are exact: every rank gets
the same answer.  Replicas (tensor parallel) send nothing: they take the plan of their first rank, or
compute it from equal inputs (`known.LastKnown` keeps those equal).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .budget import best, steady, survival
from .costs import StepCosts

BINS = 256  # survival is sent in steps of 1 / BINS
HEAD = 3
WIDTH = HEAD + 2 * (BINS + 1)


@dataclass(frozen=True)
class GroupPlan:
    """budgets: drafts to verify, by rank.  rows: those of the longest rank.  draft: run the draft pass."""

    budgets: tuple[int, ...]
    rows: int
    draft: bool
    rate: float
    plain_rate: float


def offer(
    confidence: np.ndarray, drafts: np.ndarray, *, base_rows: int, sampling: int, potential: np.ndarray | None = None
) -> np.ndarray:
    """What a rank sends, int64 [WIDTH]; arguments as in `budget.plan`.

    (sampling, base_rows, requests a draft pass covers, counts of survival in steps of 1 / BINS for the
    drafts that lie ready and for those a draft pass would make).
    """
    drafts = np.asarray(drafts)
    potential = drafts if potential is None else np.asarray(potential)
    level = np.rint(survival(confidence) * BINS).astype(np.int64)
    position = np.arange(level.shape[1])
    counts = [np.bincount(level[position < d[:, None]], minlength=BINS + 1) for d in (drafts, potential)]
    return np.concatenate(([sampling, base_rows, int((potential > 0).sum())], *counts)).astype(np.int64)


def agree(
    costs: StepCosts, offers: Sequence[np.ndarray], *, limit: int | None = None, always_draft: bool = False
) -> GroupPlan:
    """The plan of the whole group; offers in rank order; limit: the most drafts of one rank.

    costs must be the same object of data on all ranks (`costs.slowest_costs` of the exchanged ones).
    """
    table = np.stack(offers)
    sampling, base, asked = int(table[:, 0].sum()), table[:, 1], int(table[:, 2].max())
    ready, potential = table[:, HEAD : HEAD + BINS + 1], table[:, HEAD + BINS + 1 :]
    draft_ms = costs.draft_ms(asked)
    floor = int(base.max())
    tied = draft_ms if always_draft else 0.0

    plain = sampling / (float(costs.verify.at(floor)) + tied)
    gain, cost, _ = _rows(costs, base, potential, limit)
    with_drafts = steady(sampling + gain, cost + draft_ms)
    draft = asked > 0 and (always_draft or with_drafts > plain)
    rate = max(with_drafts, plain) if draft else plain

    gain, cost, taken = _rows(costs, base, ready, limit)
    budgets = taken[best(gain, cost, rate)]
    return GroupPlan(tuple(budgets.tolist()), int((base + budgets).max()), draft, rate, plain)


def _rows(costs: StepCosts, base: np.ndarray, counts: np.ndarray, limit: int | None) -> tuple:
    """The group's choices: (gain [n], cost [n], drafts taken int64 [n, ranks]).

    Choice 0 verifies nothing; choice 1 + e fills every rank up to e rows above the longest rank's base
    rows (for e = 0 the shorter ranks verify for nothing).  One trimmed rank costs all of them trim_ms.
    """
    total = counts.sum(1)
    most = total if limit is None else np.minimum(total, max(limit, 0))
    floor = int(base.max())
    extra = np.arange(max(int((base + most).max()) - floor, 0) + 1)
    taken = np.clip(floor + extra[:, None] - base, 0, most)
    taken = np.concatenate((np.zeros((1, len(base)), dtype=taken.dtype), taken))
    gain = np.zeros(len(taken), dtype=np.int64)
    for rank, row in enumerate(counts):
        levels = np.repeat(np.arange(BINS, -1, -1), row[::-1])
        gain += np.concatenate(([0], np.cumsum(levels)))[taken[:, rank]]
    trimmed = ((taken > 0) & (taken < total)).any(1)
    return gain / BINS, costs.verify.at((base + taken).max(1)) + costs.trim_ms * trimmed, taken
