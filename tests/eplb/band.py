# SPDX-License-Identifier: Apache-2.0
"""Ranks in threads or processes that step together, and a conductor (the test) who says what happens in which step."""

import multiprocessing
import os
import random
import signal
import threading
import traceback
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from deepseek_v41_plugin.eplb.board import Board
from deepseek_v41_plugin.eplb.rebalancer import Rebalancer
from deepseek_v41_plugin.eplb.transport import same_weights
from deepseek_v41_plugin.eplb.transport.shm import SharedMemory
from deepseek_v41_plugin.eplb.transport.symm_mem import SHARE_ONE_GPU, SymmetricMemory
from tests.eplb.fleet import random_maps, rows

LAYERS, EXPERTS, LOCAL, MARGIN = 3, 5, 4, 3
FOREVER = 600.0  # seconds; no test that passes comes near it
LAST = 10**6  # steps


class Player:
    """One rank.  die: where it kills its process, of load, policy, push, switch, report.  hang: in its first push, till `go`."""

    def __init__(self, store, rank: int, ranks: int, seed: int, wait: bool, die: str | None, hang: bool, cuda: bool) -> None:
        self.store, self.rank, self.die, self.hang = store, rank, die, hang
        rng = random.Random(seed)
        maps = random_maps(rng, LAYERS, EXPERTS, ranks * LOCAL)
        device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        self.weights = [[tensor.to(device) for tensor in rows(layer, row[self.slots])] for layer, row in enumerate(maps)]
        board = Board(store, "model", rank, ranks, timeout=FOREVER)
        same_weights(board, self.weights, FOREVER)
        if cuda:
            torch.cuda.set_device(device)
            dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=ranks)
            self.peers = SymmetricMemory.open(board, self.weights[0], dist.group.WORLD, FOREVER)
        else:
            self.peers = SharedMemory.open(board, self.weights[0], FOREVER)
        self.rebalancer = Rebalancer(
            "model", self.weights, maps, rank, ranks, board, self.peers, lambda load, old: random_maps(rng, LAYERS, EXPERTS, ranks * LOCAL),
            lambda layer, row: self.at("switch"), margin=MARGIN, wait=wait)
        self.jump, self.time = threading.Event(), 0.0
        self.rebalancer._worker.now = self.now
        push, arm = self.peers.push, self.rebalancer._gate.arm
        self.peers.push = lambda dst, src: (self.at("push"), push(dst, src))
        self.rebalancer._gate.arm = lambda: (self.at("report"), arm())[1]
        policy = self.rebalancer._worker.policy
        self.rebalancer._worker.policy = lambda load, old: (self.at("policy"), policy(load, old))[1]
        self.turn = random.Random(f"{seed} {rank}")

    @property
    def slots(self) -> slice:
        return slice(self.rank * LOCAL, (self.rank + 1) * LOCAL)

    def now(self) -> float:
        """No time goes by before the conductor says so, and then much: nobody is late by accident."""
        self.time += 10.0 * self.jump.is_set()
        return self.time

    def at(self, point: str) -> None:
        if point == self.die:
            self.store.set(f"dead {self.rank}", "")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.hang and point == "push":
            self.hang = False
            store = self.store.clone()
            store.set("hung", "")
            store.wait(["go"], timedelta(seconds=FOREVER))

    def load(self) -> np.ndarray:
        self.at("load")
        return np.ones((LAYERS, EXPERTS))

    def play(self) -> None:
        store = self.store.clone()
        for step in range(1, LAST):
            store.wait([f"do {step}"], timedelta(seconds=FOREVER))
            command = store.get(f"do {step}").decode()
            if command == "stop":
                break
            if "jump" in command:
                self.jump.set()
            if "back" in command:
                self.jump.clear()
            if "begin" in command and (command == "begin" or f"{self.rank}" in command.split()):
                assert self.rebalancer.begin(self.load)
            self.rebalancer.step()
            for layer, row in enumerate(self.rebalancer.maps):
                for have, want in zip(self.weights[layer], rows(layer, row[self.slots])):
                    assert torch.equal(have.cpu(), want), f"step {step}, rank {self.rank}, layer {layer}: wrong weights"
            stats = self.rebalancer.stats
            said = [int(self.rebalancer.busy), stats.finished, stats.failures, self.rebalancer.maps.tobytes().hex(), stats.last_problem]
            store.set(f"in {step} {self.rank}", repr(said))
            threading.Event().wait(self.turn.random() * 0.003)  # some are faster than others
        assert self.rebalancer.close()
        self.peers.close()


def _perform(rank: int, ranks: int, port: int, seed: int, wait: bool, die: str | None, hang: bool, cuda: bool) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=FOREVER))
    os.environ[SHARE_ONE_GPU] = "1"
    try:
        Player(store, rank, ranks, seed, wait, die, hang, cuda).play()
    except BaseException:
        store.set(f"dead {rank}", traceback.format_exc())
        raise


class Band:
    """The conductor of `ranks` processes.  `said[rank]`: busy, finished, failures, maps, last problem, of the last step."""

    def __init__(
        self, ranks: int, seed: int, wait: bool = False, die: dict[int, str] | None = None, hang: int | None = None, cuda: bool = False,
    ) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=FOREVER), wait_for_workers=False)
        self.ranks, self.step, self.said = list(range(ranks)), 0, {}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "deepseek_v41_plugin.eplb.rebalancer"])
        self.processes = [
            context.Process(target=_perform, daemon=True, args=(
                rank, ranks, self.store.port, seed, wait, (die or {}).get(rank), rank == hang, cuda))
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.store.set(f"do {self.step + 1}", "stop")
        for rank, process in enumerate(self.processes):
            process.join(FOREVER if kind is None else 1)
            process.kill()
        if kind is None:
            assert [self.processes[rank].exitcode for rank in self.ranks] == [0] * len(self.ranks)

    def play(self, command: str = "-") -> None:
        """One step of all that live: `begin`, `begin` with ranks, `jump` and `back` (time goes by, or not), or nothing."""
        self.step += 1
        self.store.set(f"do {self.step}", command)
        for rank in list(self.ranks):
            key = f"in {self.step} {rank}"
            while not self.store.check([key]) and not self.store.check([f"dead {rank}"]):
                with suppress(RuntimeError):
                    self.store.wait([key], timedelta(seconds=0.2))
                assert self.processes[rank].is_alive() or self.store.check([f"dead {rank}"]) or self.store.check([key])
            if self.store.check([key]):
                self.said[rank] = eval(self.store.get(key).decode())
            else:
                text = self.store.get(f"dead {rank}").decode()
                assert not text, text
                self.ranks.remove(rank)
        maps = {rank: self.said[rank][3] for rank in self.ranks}
        assert len(set(maps.values())) == 1, f"step {self.step}: the maps differ"

    def until_idle(self) -> None:
        self.play()
        while any(self.said[rank][0] for rank in self.ranks):
            self.play()


def hang_and_go_on(band: Band, victim: int) -> None:
    """`victim` hangs before a copy: the others give up and name it; its old pushes disturb nothing; a later rebalance works."""
    band.play("begin")
    while not band.store.check(["hung"]) and any(band.said[rank][0] for rank in band.ranks):
        band.play()
    if not band.store.check(["hung"]):  # nothing to push in this rebalance
        return
    band.play("jump")
    others = [rank for rank in band.ranks if rank != victim]
    while any(band.said[rank][2] == 0 for rank in others):
        band.play()
    for rank in others:
        text = band.said[rank][4]
        assert f"rank {victim} did not finish its pushes within 30 s" in text or (rank != 0 and "rank 0 did not answer" in text), text
    assert band.said[victim][0], "it hangs no more"
    band.play("begin")  # and while it still hangs
    band.play("back")
    band.store.set("go", "")
    band.until_idle()
    before = {rank: band.said[rank][1] for rank in band.ranks}
    band.play("begin")
    band.until_idle()
    assert all(band.said[rank][1] == before[rank] + 1 for rank in band.ranks), band.said
