# SPDX-License-Identifier: Apache-2.0
"""How many rows each expert got: counted by slot as the model runs, kept by expert over a window of steps."""

from __future__ import annotations

from collections import deque

import torch


class Loads:
    """One model's counts on the device it runs on; nothing here is read back to the host.

    counts int32 [L, P]: what the routing kernels add to in the step that runs.
    """

    def __init__(self, layers: int, experts: int, physical: int, device: torch.device, intervals: int = 1):
        self.counts = torch.zeros(layers, physical, dtype=torch.int32, device=device)
        self._sums = deque([self._zeros(experts)], maxlen=intervals)

    def _zeros(self, experts: int) -> torch.Tensor:
        return torch.zeros(self.counts.shape[0], experts, dtype=torch.int64, device=self.counts.device)

    def add(self, physical_to_logical: torch.Tensor) -> None:
        """Take over a step's counts, under the map int64 [L, P] that it ran with."""
        self._sums[-1].scatter_add_(1, physical_to_logical, self.counts.long())
        self.counts.zero_()

    def drop(self) -> None:
        """Forget a step that served nobody."""
        self.counts.zero_()

    def window(self) -> torch.Tensor:
        """Rows by expert in the last `intervals` intervals, this one included: int64 [L, E]."""
        return torch.stack(tuple(self._sums)).sum(0)

    def next_interval(self) -> None:
        self._sums.append(self._zeros(self._sums[-1].shape[1]))
