# SPDX-License-Identifier: Apache-2.0
"""What the ranks' workers say to each other, and how they stop waiting.

A generation is one rebalance; its number is the step at which `begin` was called, the same on all ranks.  Item i of a
generation is its i-th changed layer.  Messages of an item, under (generation, i, phase, rank):

    ready     my buffer is free, and none of my pushes is under way          leader, having all: ready/go
    pushed    my pushes have arrived                                         leader, having all: pushed/go
    step      the step my main thread is in; it is armed                     leader, having all: decision

The decision, (generation, i, "decision"), is either the step at which all ranks change the layer or the reason for not
doing so.  Anybody who gives up writes the latter, and the first decision stands.  A change needs everybody's `step`, so
whoever has not sent that may leave; whoever has must follow what was decided.  A generation ends with its first refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from .board import Board, Key
from .commit import Gate
from .stats import Stats

LEADER = 0
# Seconds between two looks at the board: the first, the most, the most where a main thread may be held soon, and the most
# while the main thread is idle, that is, has made no step for IDLE seconds.
FIRST, SELDOM, OFTEN, RARELY, IDLE = 0.0005, 0.02, 0.002, 0.5, 2.0

Steps = Generator[float | None, None, Any]  # yields how long it would wait: None is until woken


@dataclass(frozen=True)
class Begin:
    """A wish to rebalance: its generation, this rank's load [L, E] or a callable that gets it, the main thread's mark."""

    generation: int
    load: np.ndarray | Callable[[], np.ndarray]
    mark: Any


class Abandoned(Exception):
    """This generation has ended early."""


class Superseded(Abandoned):
    """A newer one is wanted, or none any more."""


def end(refusal: str) -> Abandoned:
    """What a rank's refusal is to the others."""
    return (Superseded if refusal in ("closing", "superseded") else Abandoned)(refusal)


class Protocol:
    """One rank's part.  A generator yields before each message and between looks, so that whoever drives it, a thread or
    a test, can stop it there.

    tell(kind, **fields): for a log.  now: seconds of a clock.
    """

    def __init__(
        self, board: Board, gate: Gate, timeout: float, patience: float, tell: Callable[..., None], now: Callable[[], float],
    ) -> None:
        self.board, self.gate, self.timeout, self.patience, self.tell, self.now = board, gate, timeout, patience, tell, now
        self.rank, self.ranks = board.rank, board.ranks
        self.stats = Stats()
        self.wish: Begin | None = None  # the newest one
        self.closing = False
        self.generation, self.item, self.subject = -1, 0, ""  # at hand; the last is the item's name in messages

    @property
    def wanted(self) -> bool:
        """Whether there is a wish newer than the generation at hand."""
        return self.wish is not None and self.wish.generation > self.generation

    def key(self, *phase: int | str) -> Key:
        return (self.generation, self.item, *phase)

    def sync(self, phase: str, verb: str, value: bytes, pause: float = SELDOM) -> Steps:
        """Until all ranks have come here with the same value."""
        keys = [self.key(phase, rank) for rank in range(self.ranks)]
        self.board.publish(keys[self.rank], value)
        yield 0
        if self.rank == LEADER:
            yield from self.until(lambda: self.board.has(*keys), verb, keys, most=pause)
            for rank, key in enumerate(keys):
                if self.board.read(key) != value:
                    self.refuse(f"rank {rank} has another plan than rank {self.rank}. Restart the ranks")
            self.board.publish(self.key(phase, "go"), b"+")
            yield 0
        else:
            yield from self.until(lambda: self.board.has(self.key(phase, "go")), verb, keys, most=pause)

    def decision(self) -> Steps:
        """The step at which all ranks change the layer.  Raises Abandoned when they do not, with the gate open."""
        reports = [self.key("step", rank) for rank in range(self.ranks)]
        decision = self.key("decision")
        step = self.gate.arm()
        # From here to `open` only the decision counts: an exception that is not Abandoned leaves the gate shut.
        yield 0
        self.board.publish(reports[self.rank], str(step).encode())
        yield 0
        try:
            if self.rank == LEADER:
                yield from self.until(lambda: self.board.has(*reports), "did not report its step", reports, self.patience, OFTEN)
                last = max(int(self.board.read(key)) for key in reports)
                yield 0
                self.board.decide(decision, str(last + self.gate.margin).encode())
                yield 0
            else:
                yield from self.until(lambda: self.board.has(decision), "did not report its step", reports, self.patience, OFTEN)
        except Abandoned as ended:
            why = ended
        else:
            why = None
        text = self.board.read(decision).decode()
        yield 0
        if text.isdecimal():
            return int(text)
        self.gate.open(None)
        raise why or end(text)

    def until(
        self, ready: Callable[[], bool], verb: str = "", keys: Sequence[Key] = (), wall: float | None = None, most: float = SELDOM,
    ) -> Steps:
        """Until `ready`.  Raises Abandoned, with the refusal written, on a newer wish, a refusal, or a time-out.

        Time counts while the main thread makes steps or waits in one: with an idle server nobody is late.
        `wall` seconds count always: for what workers do among themselves.  Without keys there is no time-out, only a
        word by the watchdog.  `keys` are those of all ranks, to name the missing.
        most: seconds between two looks.
        """
        limit = self.timeout if wall is None else wall
        spent, pause, told = 0.0, FIRST, False
        last, steps = self.now(), self.gate.steps
        while not ready():
            if self.closing or self.wanted:
                yield 0
                self.refuse("closing" if self.closing else "superseded", kind=Superseded)
            if self.board.has(self.key("decision")) and not ready():
                text = self.board.read(self.key("decision")).decode()
                raise end(text)
            now = self.now()
            if wall is not None or self.gate.blocked:
                spent, last = spent + now - last, now
            elif self.gate.steps != steps:
                spent, last, steps = spent + min(now - last, IDLE), now, self.gate.steps
            if spent >= limit and not told:
                told = True
                late = self.board.missing(keys)
                who = f"rank {', '.join(map(str, late))} {verb}" if late else f"rank {LEADER} did not answer"
                text = f"{self.subject}: {who if keys else f'rank {self.rank} has not made its change'} within {limit:g} s"
                self.stats.watchdog += 1
                self.stats.last_problem = text
                self.tell("watchdog", generation=self.generation, text=text)
                if keys:
                    yield 0
                    self.refuse(text, plain=True)
            yield pause
            pause = min(2 * pause, most if now - last < IDLE else RARELY)

    def refuse(self, why: str, error: BaseException | None = None, kind: type[Abandoned] = Abandoned, plain: bool = False) -> NoReturn:
        """Leave this generation, and say so: the others need not wait."""
        text = why if plain or kind is Superseded else f"{self.subject}: rank {self.rank}: {why}"
        self.board.decide(self.key("decision"), text.encode())
        raise kind(text) from error
