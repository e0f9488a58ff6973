# SPDX-License-Identifier: Apache-2.0
"""A fleet of rebalancers in one thread: a test chooses who acts next, what time it is, and what goes wrong."""

import random

import numpy as np
import torch

from deepseek_v41_plugin.eplb.board import Board
from deepseek_v41_plugin.eplb.commit import InDoubt
from deepseek_v41_plugin.eplb.rebalancer import Rebalancer

TIMEOUT, PATIENCE, MARGIN = 30.0, 5.0, 3
SHAPES = (((3,), torch.uint8), ((2, 2), torch.float32))


def content(layer: int, expert: int) -> list[torch.Tensor]:
    """One expert's tensors: every byte says whose it is."""
    bits = torch.Generator().manual_seed(1000 * layer + expert + 1)
    return [torch.randint(0, 256, shape, generator=bits).to(dtype) for shape, dtype in SHAPES]


def rows(layer: int, experts) -> list[torch.Tensor]:
    """The tensors [local, ...] of slots that hold `experts`."""
    return [torch.stack(parts) for parts in zip(*(content(layer, int(expert)) for expert in experts))]


def random_maps(rng: random.Random, layers: int, experts: int, physical: int) -> np.ndarray:
    maps = [[*range(experts), *(rng.randrange(experts) for _ in range(physical - experts))] for _ in range(layers)]
    for row in maps:
        rng.shuffle(row)
    return np.array(maps)


class LocalStore:
    """What one rank sees of a store in this process.  lost: it no longer answers this rank."""

    def __init__(self, data: dict[str, bytes]) -> None:
        self.data, self.lost = data, False

    def _answer(self):
        if self.lost:
            raise RuntimeError("no answer")
        return self.data

    def set_timeout(self, timeout) -> None: ...

    def set(self, key, value) -> None:
        self._answer()[key] = bytes(value)

    def check(self, keys) -> bool:
        return all(key in self._answer() for key in keys)

    def get(self, key) -> bytes:
        return self._answer()[key]

    def compare_set(self, key, expected, desired) -> bytes:
        assert expected == "" and desired
        return self._answer().setdefault(key, bytes(desired))

    def delete_key(self, key) -> bool:
        return self._answer().pop(key, None) is not None


class LocalBuffers:
    """PeerBuffers of ranks in this process.  A push is complete at the flush only; `fail` makes the next flush raise."""

    def __init__(self, shared: list[list[torch.Tensor]]) -> None:
        self._shared, self.pending, self.fail = shared, [], False

    def tensors(self, rank):
        return self._shared[rank]

    def enter(self):
        pass

    def push(self, dst, src):
        self.pending.append((dst, src))

    def flush(self):
        if self.fail:
            self.fail = False
            raise RuntimeError("a copy failed")
        for dst, src in self.pending:
            dst.copy_(src)
        self.pending = []

    def record(self):
        return None

    def wait(self, mark):
        pass

    def close(self):
        pass


class Rank:
    def __init__(self, fleet: "Fleet", rank: int, wait: bool) -> None:
        self.rank = rank
        self.store = LocalStore(fleet.data)
        self.maps = fleet.maps[0].copy()
        slots = slice(rank * fleet.local, (rank + 1) * fleet.local)
        self.weights = [rows(layer, row[slots]) for layer, row in enumerate(self.maps)]
        self.buffers = LocalBuffers(fleet.buffers)
        self.switched = self.maps.copy()  # as the host's tables would be
        self.events = []
        self.rebalancer = Rebalancer(
            "model", self.weights, self.maps, rank, fleet.ranks, Board(self.store, "model", rank, fleet.ranks), self.buffers,
            fleet.policy, self.switched.__setitem__, timeout=TIMEOUT, patience=PATIENCE, margin=MARGIN, wait=wait,
            on_event=lambda kind, **fields: self.events.append((kind, fields)))
        self.rebalancer._thread = self  # no thread: `Fleet.work` drives the worker
        self.gate, self.worker = self.rebalancer._gate, self.rebalancer._worker
        self.worker.now = lambda: fleet.clock
        self.generator = self.worker.run()
        self.steps = 0  # entered and not held in
        self.alive = True

    def working(self) -> bool:
        return self.alive and self.generator is not None


class Fleet:
    """`ranks` ranks that step together: none enters a step before all that live have entered the one before."""

    def __init__(self, rng: random.Random, ranks: int = 2, layers: int = 2, wait: bool = False, experts: int = 4, local: int = 3) -> None:
        self.rng, self.ranks, self.layers, self.experts, self.local = rng, ranks, layers, experts, local
        self.clock, self.data = 0.0, {}
        self.maps = [random_maps(rng, layers, experts, ranks * local)]
        self.planned: np.ndarray | Exception | None = None
        self.buffers = [rows(0, [0] * local) for _ in range(ranks)]
        self.history: dict[int, bytes] = {}  # of each step, the maps that the first to enter it had
        self.all = [Rank(self, rank, wait) for rank in range(ranks)]

    def policy(self, load, maps):
        assert load.shape == (self.layers, self.experts) and (load == self.ranks).all()
        if isinstance(self.planned, Exception):
            raise self.planned
        return random_maps(self.rng, self.layers, self.experts, self.ranks * self.local) if self.planned is None else self.planned

    def living(self) -> list[Rank]:
        return [rank for rank in self.all if rank.alive]

    def begin(self, rank: Rank) -> bool:
        return rank.rebalancer.begin(np.ones((self.layers, self.experts)))

    def work(self, rank: Rank) -> None:
        """One bit of the worker's work: up to its next message or wait."""
        if not rank.working():
            return
        try:
            if next(rank.generator, "ended") == "ended":
                rank.generator = None
        except Exception as error:
            rank.generator = None
            rank.worker.closing, rank.worker.stats.state = True, "off"
            rank.gate.fail(error)
            if not rank.store.lost:
                raise

    def step(self, rank: Rank) -> bool:
        """The main thread goes on if it can: into its next step, or out of one it was held in.  Whether it did."""
        if not rank.alive:
            return False
        gate = rank.gate
        if gate.steps == rank.steps:
            if any(other.steps < rank.steps for other in self.living()):
                return False
            gate.steps += 1
            free = not gate.alert
        else:
            free = False
        try:
            if not free and not gate.enter():
                return False
        except InDoubt:
            assert rank.store.lost
            rank.alive = False
            return False
        rank.steps += 1
        self.check(rank)
        return True

    def check(self, rank: Rank) -> None:
        """What a forward pass of this step would see."""
        maps = rank.rebalancer.maps
        assert np.array_equal(maps, rank.switched)
        first = self.history.setdefault(rank.steps, maps.tobytes())
        assert first == maps.tobytes(), f"step {rank.steps}: rank {rank.rank} has other maps"
        for layer, row in enumerate(maps):
            wanted = rows(layer, row[rank.rank * self.local : (rank.rank + 1) * self.local])
            for have, want in zip(rank.weights[layer], wanted):
                assert torch.equal(have, want), f"step {rank.steps}, rank {rank.rank}, layer {layer}: wrong weights"

    def busy(self) -> bool:
        return any(rank.working() and rank.rebalancer.busy or rank.gate.steps != rank.steps for rank in self.living())

    def settle(self, rounds: int = 2000) -> None:
        """Everybody acts in turn and time goes by until there is nothing left to do."""
        for _ in range(rounds):
            if not self.busy():
                return
            for rank in self.all:
                self.work(rank)
                self.step(rank)
            self.clock += 0.25
        raise AssertionError(f"not settled: {[(r.rank, r.worker.stats, r.gate.blocked, r.events[-2:]) for r in self.living()]}")
