# SPDX-License-Identifier: Apache-2.0
"""Last-known confidences by request slot, read at a fixed age so that every rank reads the same ones."""

from __future__ import annotations

from collections import deque

import numpy as np


class LastKnown:
    """Confidences on the CPU, applied exactly `age` steps after they were computed.

    What has arrived by now depends on the machine's mood, and ranks that read different values
    choose different budgets and hang.  So step t reads what steps up to t - age have left: `read`
    refuses to run before the record of step t - age was put (the adapter waits for that copy only).

    slots: rows of the host's request table; prior [k]: confidences of a request that has none yet.
    """

    def __init__(self, slots: int, prior: np.ndarray, age: int = 1):
        if age < 1:
            raise ValueError(f"age: {age} is not a number of steps >= 1")
        self.prior = np.asarray(prior, dtype=np.float32)
        self.age = age
        self._value = np.tile(self.prior, (slots, 1))
        self._owner = np.zeros(slots, dtype=np.int64)  # generation of a slot: a late record must not hit a new request
        self._waiting: deque[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = deque()
        self._next = 0

    def reset(self, slot: int) -> None:
        """A new request lives in `slot`: its confidences are the prior; late records of the old one are dropped."""
        self._value[slot] = self.prior
        self._owner[slot] += 1

    def owners(self, slots: np.ndarray) -> np.ndarray:
        """The generations of `slots` now: take them when the step is launched and give them to `put`."""
        return self._owner[slots].copy()

    def put(self, step: int, slots: np.ndarray, owners: np.ndarray, confidence: np.ndarray) -> None:
        """Confidences [n, k] of `step` for int slots [n]; steps come in order, each once (n may be 0)."""
        if step != self._next:
            raise ValueError(f"step: {step} was put, {self._next} is due; every step is put once, in order")
        self._next += 1
        self._waiting.append((step, np.array(slots), np.array(owners), np.array(confidence, dtype=np.float32)))

    def read(self, step: int, slots: np.ndarray) -> np.ndarray:
        """float32 [n, k] as `step` may see them: records of steps <= step - age."""
        due = step - self.age
        if due >= self._next:
            raise RuntimeError(f"step {step} needs the confidences of step {due}: wait for their copy and put them")
        while self._waiting and self._waiting[0][0] <= due:
            _, at, owners, confidence = self._waiting.popleft()
            alive = self._owner[at] == owners
            self._value[at[alive]] = confidence[alive]
        return self._value[slots]
