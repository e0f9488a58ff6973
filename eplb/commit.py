# SPDX-License-Identifier: Apache-2.0
"""The step at which a layer changes: between the main thread, which counts steps, and its worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .moves import RankMoves


class InDoubt(RuntimeError):
    """This rank cannot learn whether the others changed a layer: it may not serve on."""


@dataclass(frozen=True)
class Due:
    """A layer to change when step `step` begins: its new row [P] and this rank's moves."""

    step: int
    layer: int
    row: np.ndarray
    moves: RankMoves


class Gate:
    """No step is entered that a decision under way may concern.

    The worker arms the gate and gets the number s of the main thread's step.  From then on the main thread does not
    enter step s + margin before the worker opens the gate with what was decided.  A commit at S >= s + margin is thus
    known on every rank before it enters S, however far the ranks' threads are apart.
    With `drain` set (by the main thread) no step is left before the worker is done; margin is 0 then.
    """

    def __init__(self, margin: int, apply: Callable[[Due], Any], wake: Callable[[], None]) -> None:
        self.margin, self._apply, self._wake = margin, apply, wake
        self.steps = 0  # written by the main thread only
        self.alert = False  # whether a step has anything to look at; only lowered under the lock
        self.blocked = False  # the main thread waits in here
        self.drain = False
        self.due: Due | None = None
        self.mark: Any = None  # of the last change; whoever reuses its buffer waits for it
        self.error: BaseException | None = None  # why the worker ended
        self._limit: int | None = None
        self.changed = threading.Condition()

    def step(self) -> None:
        """A new step begins, on the main thread.  Raises InDoubt."""
        self.steps += 1  # before the look at `alert`: `arm` does it the other way round, so one of them sees the other
        if self.alert:
            with self.changed:
                while not self.enter():
                    self.changed.wait(1.0)
                    self._wake()

    def enter(self) -> bool:
        """Change the layer that is due. Whether the step may go on."""
        with self.changed:
            if self.due is not None and self.due.step <= self.steps:
                self.mark = self._apply(self.due)
                self.due = None
                self._wake()
            armed = self._limit is not None
            held = armed and self.steps >= self._limit
            if held and self.error is not None:
                raise InDoubt("the worker ended between a report and the decision; restart the ranks") from self.error
            self.blocked = held or (self.drain and self.error is None)
            self.alert = self.blocked or armed or self.due is not None
            return not self.blocked

    def arm(self) -> int:
        """The step the main thread is in; it will not enter the one `margin` later before `open`."""
        with self.changed:
            self.alert = True
            self._limit = self.steps + self.margin
            return self._limit - self.margin

    def open(self, due: Due | None) -> None:
        """What was decided: a change, or none."""
        with self.changed:
            self._limit, self.due = None, due
            self.changed.notify_all()

    def release(self) -> None:
        """Nothing more is to come."""
        with self.changed:
            self.drain = False
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The worker has ended."""
        with self.changed:
            self.error = error
            self.changed.notify_all()
