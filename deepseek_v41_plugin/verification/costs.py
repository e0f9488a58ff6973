# SPDX-License-Identifier: Apache-2.0
"""What a step costs: the target over its rows, the draft over its requests, the trimming of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .curve import Curve, slowest


@dataclass(frozen=True)
class StepCosts:
    """Costs of one step in ms.

    verify: the target's forward and sampling over all rows of the batch (prefill rows too).
    draft:  the draft pass over the requests that get drafts.
    trim_ms: what choosing lengths and remapping adds when some, but not all, drafts are verified.
    """

    verify: Curve
    draft: Curve
    trim_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.trim_ms < float("inf"):
            raise ValueError(f"trim_ms: {self.trim_ms!r} is not a finite number >= 0")

    def draft_ms(self, requests: int) -> float:
        """Cost of a draft pass over `requests` (none: 0)."""
        return float(self.draft.at(requests)) if requests else 0.0

    def verify_ms(self, base_rows: int, drafts: int, limit: int | None = None) -> np.ndarray:
        """ms [n + 1] of verifying 0..n drafts beside `base_rows` others, n = min(drafts, limit)."""
        n = drafts if limit is None else min(drafts, max(limit, 0))
        cost = self.verify.at(base_rows + np.arange(n + 1))
        cost[1 : min(n + 1, drafts)] += self.trim_ms
        return cost


def slowest_costs(ranks: Sequence[StepCosts]) -> StepCosts:
    """The costs of a group whose ranks wait for each other: the slowest everywhere."""
    return StepCosts(
        slowest([r.verify for r in ranks]), slowest([r.draft for r in ranks]), max(r.trim_ms for r in ranks)
    )
