# SPDX-License-Identifier: Apache-2.0
"""When to count and when to rebalance: the same on all ranks, which step together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Schedule:
    """vLLM's: every `interval` steps, from the loads of the last `window` steps; the first after a quarter.

    A window longer than the interval is rounded up to whole intervals.
    """

    window: int = 1000
    interval: int = 3000

    def __post_init__(self) -> None:
        self.steps = self.interval - max(1, self.interval // 4)

    @property
    def intervals(self) -> int:
        """Intervals that the window reaches into."""
        return -(-self.window // self.interval)

    @property
    def recording(self) -> bool:
        """Whether the step to come is one of the last `window` before a rebalance."""
        return self.interval - self.steps <= self.window

    def tick(self) -> bool:
        """A step is over, a dummy one too: whether to rebalance now."""
        self.steps += 1
        if self.steps < self.interval:
            return False
        self.steps = 0
        return True
