# SPDX-License-Identifier: Apache-2.0
"""What users see of drafting: counts that only grow, for the host's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Tally:
    """Counts over steps of k drafts a request.

    drafted, verified, accepted: drafts.  saved_rows: drafts that were made and not verified.
    accepted_by_position, verified_by_position: int64 [k].  budget: sum of the steps' budgets; steps.
    """

    k: int
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    budget: int = 0
    steps: int = 0
    verified_by_position: np.ndarray = field(init=False)
    accepted_by_position: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.verified_by_position = np.zeros(self.k, dtype=np.int64)
        self.accepted_by_position = np.zeros(self.k, dtype=np.int64)

    @property
    def saved_rows(self) -> int:
        return self.drafted - self.verified

    def add(self, budget: int, drafts: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """One step: int [R] drafts made, verified and accepted of each request."""
        position = np.arange(self.k)
        self.drafted += int(np.sum(drafts))
        self.verified += int(np.sum(verified))
        self.accepted += int(np.sum(accepted))
        self.budget += int(budget)
        self.steps += 1
        self.verified_by_position += (position < np.asarray(verified)[:, None]).sum(0)
        self.accepted_by_position += (position < np.asarray(accepted)[:, None]).sum(0)
