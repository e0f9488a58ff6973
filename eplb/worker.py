# SPDX-License-Identifier: Apache-2.0
"""One rank's worker: from a load to new maps, layer by layer, as a generator that a thread drives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from . import maps as maps_of
from .board import Board
from .commit import Due, Gate
from .moves import digest, moves
from .protocol import LEADER, OFTEN, Abandoned, Begin, Protocol, Steps, Superseded
from .transport import PeerBuffers


class Worker(Protocol):
    """One rank's worker.  `maps` [L, P] are those of all decisions so far, equal on all ranks in equal generations."""

    def __init__(
        self, weights: Sequence[Sequence[torch.Tensor]], maps: np.ndarray, board: Board, peers: PeerBuffers,
        gate: Gate, policy: Callable[[np.ndarray, np.ndarray], np.ndarray], timeout: float, patience: float,
        tell: Callable[..., None] = lambda kind, **fields: None, now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(board, gate, timeout, patience, tell, now)
        self.weights, self.maps, self.peers, self.policy = weights, maps.copy(), peers, policy
        self.experts = int(maps.max()) + 1
        self._next = 0  # the layer behind the last changed one: where the next generation starts
        self._flushed = True
        self._row_bytes = sum(t[0].numel() * t.element_size() for t in weights[0])

    def run(self) -> Steps:
        """Generations, as wished for, until closing."""
        while not self.closing:
            with self.gate.changed:  # against `begin`
                if idle := not self.wanted:
                    self.gate.release()
            if idle:
                yield None
            else:
                yield from self._generation_of(self.wish)
        self.stats.state = "off"
        self.gate.release()

    def _generation_of(self, wish: Begin) -> Steps:
        stats, start = self.stats, self.now()
        stats.state = "load"
        self.generation = stats.generation = wish.generation
        stats.generations += 1
        self.tell("begin", generation=wish.generation)
        try:
            self.item, self.subject = 0, "loads"
            order, new = yield from self._plan(wish)
            self.board.forget(wish.generation)  # there is a plan, so every rank has left the older ones
            for item, layer in enumerate(order):
                self.item, self.subject = item, f"layer {layer}"
                yield from self._change(layer, new[layer])
            stats.finished += 1
            self.tell("finished", generation=wish.generation, layers=len(order), seconds=self.now() - start)
        except Abandoned as end:
            if isinstance(end, Superseded):
                stats.superseded += 1
            else:
                stats.failures += 1
                stats.last_problem = str(end)
            self.tell("abandoned", generation=wish.generation, reason=str(end), superseded=isinstance(end, Superseded))
        stats.last_seconds = self.now() - start
        stats.seconds += stats.last_seconds
        stats.state = "idle"

    # ---- the plan

    def _plan(self, wish: Begin) -> Steps:
        """The layers to change, in order, and the new maps [L, P]."""
        self.peers.wait(wish.mark)
        try:
            load = np.ascontiguousarray(wish.load() if callable(wish.load) else wish.load, dtype=np.float64)
            if load.shape != (len(self.maps), self.experts):
                raise ValueError(f"load: its shape is {load.shape}. Give one number for each of {(len(self.maps), self.experts)}")
        except Exception as error:
            self.refuse(f"its load failed: {error}", error)
        keys = [self.key("load", rank) for rank in range(self.ranks)]
        self.board.publish(keys[self.rank], self._agreed() + load.tobytes())
        yield 0
        if self.rank == LEADER:
            yield from self.until(lambda: self.board.has(*keys), "did not begin", keys)
            self.stats.state = "plan"
            self.board.publish(self.key("plan"), self._decide_plan([self.board.read(key) for key in keys]))
            yield 0
        else:
            yield from self.until(lambda: self.board.has(self.key("plan")), "did not begin", keys)
        text = self.board.read(self.key("plan"))
        order, new = json.loads(text[: text.index(b"\n")]), np.frombuffer(text[text.index(b"\n") + 1 :], np.int64)
        if new.size != self.maps.size or (wrong := maps_of.problem(new.reshape(self.maps.shape), self.experts, self.ranks)):
            self.refuse(f"the plan is wrong: {wrong if new.size == self.maps.size else 'another number of slots'}")
        self.tell("plan", generation=wish.generation, layers=order)
        return order, new.reshape(self.maps.shape)

    def _agreed(self) -> bytes:
        return digest(self.maps, np.array(self.gate.margin))

    def _decide_plan(self, texts: list[bytes]) -> bytes:
        """On the leader, from all ranks' loads."""
        load = np.zeros((len(self.maps), self.experts))
        for rank, text in enumerate(texts):
            if text[:16] != self._agreed():
                self.refuse(f"rank {rank} has other maps or another margin than rank {self.rank}. Restart the ranks")
            load += np.frombuffer(text[16:], np.float64).reshape(load.shape)
        try:
            new = np.array(self.policy(load, self.maps.copy()), dtype=np.int64)
            if new.shape != self.maps.shape:
                raise ValueError(f"a map of shape {new.shape} instead of {self.maps.shape}")
            if wrong := maps_of.problem(new, self.experts, self.ranks):
                raise ValueError(wrong)
        except Exception as error:
            self.refuse(f"the policy failed: {error}", error)
        changed = np.flatnonzero((new != self.maps).any(1))
        # Begin behind the last changed layer, so that generations that are cut short get to all layers in the end.
        order = sorted(changed.tolist(), key=lambda layer: (layer - self._next) % len(new))
        return json.dumps(order).encode() + b"\n" + new.tobytes()

    # ---- one layer

    def _change(self, layer: int, row: np.ndarray) -> Steps:
        """The item at hand: `layer` gets the map `row` [P]."""
        self.stats.state = "move"
        plan = moves(self.maps[layer], row, self.ranks)[self.rank]
        yield from self._consumed()
        yield from self.sync("ready", "is not ready", digest(self.maps[layer], row))
        try:
            self._flushed = False
            for slot, peer, to in plan.pushes:
                for dst, src in zip(self.peers.tensors(peer), self.weights[layer]):
                    self.peers.push(dst[to], src[slot])
                yield 0
            self.peers.flush()
            self._flushed = True
        except (RuntimeError, OSError) as error:
            self.refuse(f"its pushes failed: {error}", error)
        yield from self.sync("pushed", "did not finish its pushes", b"+", OFTEN)

        self.stats.state = "commit"
        step = yield from self.decision()
        self.maps[layer] = row
        self._next = (layer + 1) % len(self.maps)
        self.item += 1
        self.gate.open(Due(step, layer, row, plan))
        sent = sum(peer != self.rank for _, peer, _ in plan.pushes)
        self.stats.layers += 1
        self.stats.experts += sent
        self.stats.bytes += sent * self._row_bytes
        self.tell("layer", generation=self.generation, layer=layer, step=step, experts=sent)
        yield from self._consumed()

    def _consumed(self) -> Steps:
        """Until the main thread has made the last change and its device is behind it: the buffer is free; no push under way."""
        yield from self.until(lambda: self.gate.due is None)
        self.peers.wait(self.gate.mark)
        if not self._flushed:
            self.peers.flush()
            self._flushed = True
