# SPDX-License-Identifier: Apache-2.0
"""The control plane of a rebalancer: short messages under keys of a torch Store, that can be given up on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

Key = tuple[int | str, ...]


class BoardLost(RuntimeError):
    """The store does not answer: its process has ended or is out of reach."""


class Missing(TimeoutError):
    """Ranks that did not publish in time."""

    def __init__(self, what: str, ranks: Sequence[int], seconds: float) -> None:
        self.ranks = tuple(ranks)
        super().__init__(f"{what}: nothing from rank {', '.join(map(str, ranks))} in {seconds:g} s. See the log of that rank")


class Board:
    """One rank's view of the messages of the rebalancer `name`.

    A key is a tuple; by convention (generation, item, phase, rank).  Nothing here waits, except `gather`, so that a
    worker can give up whenever it likes.  It is used by one thread at a time: a client of a store serves one.
    """

    def __init__(self, store, name: str, rank: int, ranks: int, timeout: float = 30.0) -> None:
        self.name, self.rank, self.ranks = name, rank, ranks
        self._store = store.clone() if hasattr(store, "clone") else store
        # A bound on each request, in case the store's process hangs.
        self._store.set_timeout(timedelta(seconds=timeout))
        self._written: dict[int | str, set[Key]] = {}

    def _path(self, key: Key) -> str:
        return "/".join(("dsv41-eplb", self.name, *map(str, key)))

    def _ask(self, request: Callable, *args):
        try:
            return request(*args)
        except (RuntimeError, OSError) as error:  # torch's DistError family
            raise BoardLost(f"the store of rebalancer {self.name} does not answer: {error}") from error

    def _note(self, key: Key) -> None:
        self._written.setdefault(key[0], set()).add(key)

    def publish(self, key: Key, value: bytes) -> None:
        self._note(key)
        self._ask(self._store.set, self._path(key), value)

    def has(self, *keys: Key) -> bool:
        """Whether all `keys` have been published."""
        return self._ask(self._store.check, [self._path(key) for key in keys])

    def read(self, key: Key) -> bytes | None:
        return self._ask(self._store.get, self._path(key)) if self.has(key) else None

    def decide(self, key: Key, value: bytes) -> bytes:
        """The decision under `key`: the first value that anybody gave (not empty).  All ranks get the same one."""
        self._note(key)
        return self._ask(self._store.compare_set, self._path(key), "", value)

    def missing(self, keys: Sequence[Key]) -> list[int]:
        """Ranks (the places in `keys`) that have not published."""
        return [rank for rank, key in enumerate(keys) if not self.has(key)]

    def forget(self, keep: int) -> None:
        """Delete what this rank wrote in generations before `keep`, which every rank must have left for good."""
        for generation in [g for g in self._written if isinstance(g, int) and g < keep]:
            for key in self._written.pop(generation):
                try:
                    self._store.delete_key(self._path(key))
                except RuntimeError:  # a FileStore keeps everything
                    pass

    def gather(self, what: str, value: bytes, timeout: float) -> list[bytes]:
        """Every rank's `value`, in the order of ranks: for start-up, where the main thread may wait.

        `what` names the exchange; it is used once in a board's life.  Raises Missing after `timeout` seconds, on all ranks or on none.
        """
        keys: list[Key] = [(what, rank) for rank in range(self.ranks)]
        self.publish(keys[self.rank], value)
        end, pause = time.monotonic() + timeout, 0.001
        while not (complete := self.has(*keys)) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        late = [] if complete else self.missing(keys)
        outcome = json.loads(self.decide((what, "late"), json.dumps(late).encode()))  # one rank's impatience is everybody's
        if outcome:
            raise Missing(f"rebalancer {self.name}, {what}", outcome, timeout)
        return [self._ask(self._store.get, self._path(key)) for key in keys]
