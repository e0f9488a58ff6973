# SPDX-License-Identifier: Apache-2.0
"""The step's total number of verified drafts, chosen on the CPU before the fresh confidences are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import StepCosts


@dataclass(frozen=True)
class Plan:
    """budget: drafts to verify in this step.  draft: whether to run the draft pass after it.

    tokens and cost_ms are what the model expects of the step, the draft pass included when it runs;
    rate is the tokens a ms expected of steps like this one; plain_rate that of decoding without drafts.
    """

    budget: int
    draft: bool
    tokens: float
    cost_ms: float
    rate: float
    plain_rate: float


def survival(confidence: np.ndarray) -> np.ndarray:
    """S_i = c_1 ... c_i of confidences [R, k] in 0..1 (NaN counts as 0), float64."""
    confidence = np.nan_to_num(np.asarray(confidence, dtype=np.float64), nan=0.0)
    return np.cumprod(np.clip(confidence, 0.0, 1.0), axis=1)


def gains(chance: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Expected accepted drafts [n + 1] when the best 0..n are verified: chance [R, k], drafts int [R].

    Sorted and summed in descending order, so the order of the requests does not matter.
    """
    valid = np.arange(chance.shape[1]) < np.asarray(drafts)[:, None]
    return np.concatenate(([0.0], np.cumsum(np.sort(chance[valid])[::-1])))


def best(gain: np.ndarray, cost: np.ndarray, rate: float) -> int:
    """The number n of drafts with the largest gain[n] - rate * cost[n].

    gain and cost are [m]; gain does not fall.  Among equals the fewest; then rows that cost nothing
    more (a padded graph, an idle machine) are added: the estimate that they are useless is stale.
    """
    n = int(np.argmax(gain - rate * cost))
    return n + int(np.flatnonzero(cost[n:] <= cost[n])[-1])


def steady(tokens: np.ndarray, cost: np.ndarray) -> float:
    """The best tokens a ms of a step repeated for ever: the largest tokens[n] / cost[n]."""
    return float(np.max(tokens / cost))


def plan(
    costs: StepCosts,
    confidence: np.ndarray,
    drafts: np.ndarray,
    *,
    base_rows: int,
    sampling: int,
    potential: np.ndarray | None = None,
    limit: int | None = None,
    always_draft: bool = False,
) -> Plan:
    """Maximises expected tokens a second from last-known confidences.

    confidence [R, k] calibrated, one or two steps old (a prior for new requests); drafts int [R] that
    lie ready; base_rows >= 0 rows of the batch that are no drafts; sampling: requests that emit a token
    in this step; potential int [R]: drafts a draft pass would make (default: as `drafts`);
    limit: the most drafts the host can take; always_draft: the host cannot leave the draft pass out.

    The draft pass pays only through the next step, so it is judged on a step like this one with
    `potential` drafts: it runs when that beats decoding without drafts.  The drafts that lie ready are
    already paid for; each is verified if it earns more than the time it takes would earn otherwise
    (at rate r: gain - r * cost is maximal; for a repeated step that is the maximum of tokens / cost).
    Hence neither a budget nor a draft pass ever lowers the expected rate under that without drafts.
    """
    drafts = np.asarray(drafts)
    potential = drafts if potential is None else np.asarray(potential)
    chance = survival(confidence)
    asked = int((potential > 0).sum())
    draft_ms = costs.draft_ms(asked)
    tied = draft_ms if always_draft else 0.0

    plain = sampling / (float(costs.verify.at(base_rows)) + tied)
    offer = gains(chance, potential)
    cost = costs.verify_ms(base_rows, len(offer) - 1, limit)
    with_drafts = steady(sampling + offer[: len(cost)], cost + draft_ms)
    draft = asked > 0 and (always_draft or with_drafts > plain)
    rate = max(with_drafts, plain) if draft else plain

    ready = gains(chance, drafts)
    cost = costs.verify_ms(base_rows, len(ready) - 1, limit)
    n = best(ready[: len(cost)], cost, rate)
    spent = float(cost[n]) + (draft_ms if draft else 0.0)
    return Plan(n, draft, sampling + float(ready[n]), spent, rate, plain)
