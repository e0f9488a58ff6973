# SPDX-License-Identifier: Apache-2.0
"""One model's experts on one rank: what a host's main thread calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import maps as maps_of
from .board import Board
from .commit import Due, Gate
from .protocol import Begin
from .stats import Stats
from .transport import PeerBuffers
from .worker import Worker


class Rebalancer:
    """Moves experts between ranks while the model runs.

    weights[layer][i]: tensors [local, ...], contiguous, of equal shapes in all layers and on all ranks.
    physical_to_logical: int64 [L, P], the maps now.  board, peers: see eplb/board.py, eplb/transport.
    policy(load float64 [L, E], maps [L, P]) -> maps [L, P]: called on rank 0's worker only.
    switch(layer, row [P]): called in `step`, right after the layer's weights have changed, before the step runs.
    timeout: seconds a rank may be late; patience: the same while main threads may be held.  margin: steps between the
    decision and the change.  wait: finish a rebalance inside the next `step`.
    on_event(kind, **fields): begin, plan, layer, finished, abandoned, watchdog, off; mostly from the worker's thread.

    All ranks call `step` before each forward pass and `begin` at the same step.  The maps are equal on all ranks in
    every step, whatever happens to a rebalance.  An idle one costs a step one look at a flag.
    """

    def __init__(
        self, name: str, weights: Sequence[Sequence[torch.Tensor]], physical_to_logical: np.ndarray, rank: int, ranks: int,
        board: Board, peers: PeerBuffers, policy: Callable[[np.ndarray, np.ndarray], np.ndarray],
        switch: Callable[[int, np.ndarray], None], timeout: float = 30.0, margin: int = 8, wait: bool = False,
        on_event: Callable[..., None] | None = None, patience: float = 5.0,
    ) -> None:
        self.maps = np.array(physical_to_logical, dtype=np.int64)
        if len(weights) != len(self.maps):
            raise ValueError(f"weights: {len(weights)} layers, but maps of {len(self.maps)}")
        if wrong := maps_of.problem(self.maps, int(self.maps.max()) + 1, ranks):
            raise ValueError(f"physical_to_logical: {wrong}")
        if (rank, ranks) != (board.rank, board.ranks):
            raise ValueError(f"board: it is that of rank {board.rank} of {board.ranks}, not of {rank} of {ranks}")
        if margin < 1:
            raise ValueError(f"margin: {margin} steps. Give at least 1")
        self.name, self.wait = name, wait
        self._weights, self._peers, self._switch = weights, peers, switch
        self._on_event = on_event
        self._wake = threading.Event()
        self._gate = Gate(0 if wait else margin, self._apply, self._wake.set)
        self._worker = Worker(
            weights, self.maps, board, peers, self._gate, policy, timeout, patience, self._tell)
        self._thread: threading.Thread | None = None
        self._last = -1
        self.step = self._gate.step

    @property
    def stats(self) -> Stats:
        return self._worker.stats

    @property
    def busy(self) -> bool:
        """Whether a rebalance is wished for, under way, or waits for its step."""
        worker = self._worker
        return self._gate.due is not None or worker.stats.state not in ("idle", "off") or (worker.wanted and not worker.closing)

    def begin(self, load: np.ndarray | Callable[[], np.ndarray]) -> bool:
        """Wish for a rebalance; a running one ends behind the layer at hand.  False when there can be none any more.

        load: this rank's [L, E], or what the worker calls to get it (it may wait for a device).  Once in a step.
        """
        worker, gate = self._worker, self._gate
        if worker.closing or gate.error is not None or gate.steps <= self._last:
            return False
        self._last = gate.steps
        with gate.changed:
            worker.wish = Begin(gate.steps, load, self._peers.record())
            if self.wait:
                gate.drain = gate.alert = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"eplb-{self.name}", daemon=True)
            self._thread.start()
        self._wake.set()
        return True

    def close(self, timeout: float = 10.0) -> bool:
        """End the worker.  Whether it has ended; it is a daemon in any case.

        A change that was decided is still made by a `step` that comes after.  The buffers are the caller's to close.
        """
        self._worker.closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _apply(self, due: Due) -> Any:
        """Buffer to weights, on the main thread; the mark behind it."""
        buffer = self._peers.tensors(self._worker.rank)
        for slot, row, n in due.moves.fills:
            for dst, src in zip(self._weights[due.layer], buffer):
                dst[slot : slot + n].copy_(src[row : row + n], non_blocking=True)
        self.maps[due.layer] = due.row
        self._switch(due.layer, due.row.copy())
        return self._peers.record()

    def _tell(self, kind: str, **fields) -> None:
        if self._on_event is not None:
            try:
                self._on_event(kind, **fields)
            except Exception as error:  # a log that fails must not leave a decision open
                self.stats.last_problem = f"on_event: {error}"

    def _run(self) -> None:
        try:
            self._peers.enter()
            for pause in self._worker.run():
                if pause is None or pause > 0:
                    self._wake.wait(pause)
                    self._wake.clear()
        except BaseException as error:
            self._worker.closing = True
            self._worker.stats.state = "off"
            self._worker.stats.last_problem = f"the worker ended: {error}"
            self._gate.fail(error)
            self._tell("off", reason=str(error))
