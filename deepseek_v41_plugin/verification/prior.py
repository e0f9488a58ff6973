# SPDX-License-Identifier: Apache-2.0
"""What to expect of a draft block of which nothing is known yet: the mean of those seen."""

from __future__ import annotations

import numpy as np

HORIZON = 256  # blocks over which the mean forgets
HOPE = 1 / 512  # share of the way to 1 that a step without a draft pass moves it


class Prior:
    """Mean confidences by position, float64 [k], starting at 1: a fresh engine drafts until it knows better.

    Without a draft pass nothing is learnt, and a pass that was once judged useless would never be tried
    again.  So a step that leaves it out uses the mean, not the last values, and the mean rises slowly.
    """

    def __init__(self, k: int):
        self.value = np.ones(k)

    def see(self, confidence: np.ndarray) -> None:
        """Confidences [n, k] of n new blocks, weighted equally."""
        if len(confidence):
            mean = np.nan_to_num(np.asarray(confidence, dtype=np.float64), nan=0.0).mean(0)
            self.value = self.value + (mean - self.value) * (1 - (1 - 1 / HORIZON) ** len(confidence))

    def wait(self) -> None:
        """A step passed without a draft pass."""
        self.value = self.value + (1 - self.value) * HOPE
