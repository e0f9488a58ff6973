#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Moving experts between GPUs while a model decodes: how fast, and what the steps notice. One process a rank.

    eplb_transport.py [--device cuda|cpu] [--ranks 2] [--transports ours,torch_gloo,pynccl,nixl] [--csv bench/data/eplb-transport-h200.csv]

Pushes: GB/s of one rank's pushes to its neighbour, all ranks at once, by size; beside them a plain copy between two GPUs
(within one, if there is one only) and what nvidia-smi says of the links.
Rebalance: layers of real size whose every slot goes to another rank, during steps of about 10 ms (a CUDA graph of matrix
products that stream weights, and a barrier, as expert parallelism has them).  Median and longest step, quiet and during
the rebalance; its seconds and bytes.  All experts' bytes are compared in the end.  Then the same with the host's transports.

--device cpu: tiny sizes in shared memory, ours only, to see that it runs.  With one GPU all ranks share it.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import time
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from eplb_host import NAMES, HostMover
from rows import append, commit

# The released model: hidden and expert sizes, layers, experts.
HIDDEN, INNER, LAYERS, EXPERTS = 5120, 2304, 40, 384
WARM_UP, QUIET, STEP_SECONDS = 20, 200, 0.010


def expert_shapes(hidden: int, inner: int) -> list[tuple[int, int]]:
    """uint8 shapes of w13, its scales, w2, its scales of one expert in MXFP4."""
    return [(2 * inner, hidden // 2), (2 * inner, hidden // 32), (hidden, inner // 2), (hidden, inner // 32)]


class Bench:
    """One rank."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.ranks, self.args = rank, args.ranks, args
        cuda = args.device == "cuda"
        self.device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.hidden, self.inner = (HIDDEN, INNER) if cuda else (64, 32)
        self.layers, self.local = (4, 13) if cuda else (3, 4)
        self.expert_bytes = sum(a * b for a, b in expert_shapes(self.hidden, self.inner))
        self.maps = np.tile(np.arange(self.ranks * self.local), (self.layers, 1))
        self.work = self._decode()

    def weights(self) -> list[list[torch.Tensor]]:
        """Bytes that say layer and expert."""
        experts = self.maps[0][self.rank * self.local : (self.rank + 1) * self.local]
        return [
            [torch.stack([torch.full(shape, (7 * layer + int(expert)) % 251, dtype=torch.uint8, device=self.device) for expert in experts])
             for shape in expert_shapes(self.hidden, self.inner)]
            for layer in range(self.layers)
        ]

    def _decode(self):
        """A callable that runs one step's work and waits for it."""
        if self.device.type == "cpu":
            a = torch.randn(128, 128)
            return lambda: [a @ a for _ in range(20)]
        x = torch.randn(64, 8192, dtype=torch.bfloat16, device=self.device)
        many = [torch.randn(8192, 8192, dtype=torch.bfloat16, device=self.device) / 90 for _ in range(4)]  # more than the L2 holds

        def chain(n: int) -> None:
            y = x
            for i in range(n):
                y = y @ many[i % 4]

        chain(8)
        torch.cuda.synchronize()
        start = time.perf_counter()
        chain(200)
        torch.cuda.synchronize()
        n = max(1, round(200 * STEP_SECONDS / (time.perf_counter() - start)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(n)
        done = torch.cuda.Event()

        def work() -> None:
            graph.replay()
            done.record()
            done.synchronize()

        return work

    def record(self, transport: str, what: str, unit: str, values: list[float]) -> None:
        """A row of the slowest rank's values, which all ranks call for together."""
        everybody: list = [None] * self.ranks
        dist.all_gather_object(everybody, values)
        values = max(everybody, key=statistics.median) if unit != "GB/s" else min(everybody, key=statistics.median)
        if self.rank:
            return
        try:
            import vllm

            version = vllm.__version__
        except ImportError:
            version = "-"
        row = {
            "date": date.today(), "transport": transport, "ranks": self.ranks, "gpus": min(self.ranks, torch.cuda.device_count()),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu", "torch": torch.__version__, "vllm": version,
            "commit": commit(), "what": what, "unit": unit,
            "median": f"{statistics.median(values):.3f}", "low": f"{min(values):.3f}", "high": f"{max(values):.3f}",
        }
        print("  ".join(map(str, row.values())), flush=True)
        if self.args.csv:
            append(self.args.csv, [row])

    # ---- pushes

    def pushes(self, buffers, source: list[torch.Tensor]) -> float:
        """GB/s at the largest size."""
        peer = (self.rank + 1) % self.ranks
        dst, src = (max(tensors, key=torch.numel).view(-1) for tensors in (buffers.tensors(peer), source))
        rate = 0.0
        for size in (*(size for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24) if size < dst.numel()), dst.numel()):
            times = max(1, min(200, (1 << 30) // size))
            for name, copy, wait in (
                ("push", lambda: buffers.push(dst[:size], src[:size]), buffers.flush),
                ("plain copy", *self._plain_copy(size)),
            ):
                seconds = []
                for _ in range(6):
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(times):
                        copy()
                    wait()
                    seconds.append(time.perf_counter() - start)
                rates = [times * size / s / 1e9 for s in seconds[1:]]
                self.record("ours" if name == "push" else "-", f"{name} of {size >> 10} KiB", "GB/s", rates)
                rate = statistics.median(rates) if name == "push" else rate
        if self.device.type == "cuda":
            self.record("-", "nvidia-smi: one direction of all links", "GB/s", [self._nvlink()])
        return rate

    def _plain_copy(self, size: int):
        """A copy to the next GPU that this process sees, without symmetric memory."""
        if self.device.type == "cpu":
            a, b = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
            return (lambda: a.copy_(b)), (lambda: None)
        other = torch.device("cuda", (self.device.index + 1) % torch.cuda.device_count())
        a = torch.zeros(size, dtype=torch.uint8, device=other)
        b = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return (lambda: a.copy_(b, non_blocking=True)), torch.cuda.synchronize

    def _nvlink(self) -> float:
        """0 without links or nvidia-smi."""
        try:
            text = subprocess.run(
                ["nvidia-smi", "nvlink", "-s", "-i", str(self.device.index)], capture_output=True, text=True, timeout=30).stdout
        except OSError:
            return 0.0
        return sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", text)))

    # ---- steps

    def step(self, hook) -> float:
        """Milliseconds of one step."""
        start = time.perf_counter()
        hook()
        self.work()
        dist.barrier()
        return (time.perf_counter() - start) * 1e3

    def rebalance(self, name: str, hook, begin, busy, weights) -> tuple[float, float]:
        """Seconds and bytes of moving everything; the steps meanwhile."""
        for _ in range(WARM_UP):
            self.step(hook)
        self.record(name, "step, quiet", "ms", [self.step(hook) for _ in range(QUIET)])
        target = np.roll(self.maps, self.local, axis=1)
        begin(target)
        start, times, going = time.perf_counter(), [], torch.ones(1)
        while going.item():
            times.append(self.step(hook))
            going[0] = busy()
            dist.all_reduce(going, op=dist.ReduceOp.MAX)  # outside of the steps: all stop together
        seconds = time.perf_counter() - start
        moved = self.layers * self.local * self.expert_bytes
        self.record(name, "step, rebalancing", "ms", times)
        self.record(name, f"rebalance of {self.layers} layers, {moved / 1e9:.3f} GB a rank", "s", [seconds])
        row = target[0][self.rank * self.local : (self.rank + 1) * self.local]
        for layer in range(self.layers):
            for tensor in weights[layer]:
                for slot, expert in enumerate(row):
                    assert bool((tensor[slot] == (7 * layer + int(expert)) % 251).all()), f"{name}: layer {layer}, slot {slot}: wrong bytes"
        return seconds, moved

    def ours(self, store) -> None:
        from deepseek_v41_plugin.eplb.board import Board
        from deepseek_v41_plugin.eplb.rebalancer import Rebalancer
        from deepseek_v41_plugin.eplb.transport import same_weights
        from deepseek_v41_plugin.eplb.transport.shm import SharedMemory
        from deepseek_v41_plugin.eplb.transport.symm_mem import SymmetricMemory

        weights = self.weights()
        board = Board(store, "bench", self.rank, self.ranks)
        same_weights(board, weights, 60.0)
        buffers = (
            SymmetricMemory.open(board, weights[0], dist.group.WORLD, 60.0) if self.device.type == "cuda"
            else SharedMemory.open(board, weights[0], 60.0))
        rate = self.pushes(buffers, weights[0])
        dist.barrier()
        target = np.roll(self.maps, self.local, axis=1)
        rebalancer = Rebalancer(
            "bench", weights, self.maps, self.rank, self.ranks, board, buffers, lambda load, maps: target, lambda layer, row: None)
        load = np.ones((self.layers, self.ranks * self.local))
        seconds, moved = self.rebalance("ours", rebalancer.step, lambda new: rebalancer.begin(load), lambda: rebalancer.busy, weights)
        assert rebalancer.stats.failures == 0, rebalancer.stats.last_problem
        if self.rank == 0:
            self._extrapolate(seconds, moved, rate)
        rebalancer.close()
        dist.barrier()
        buffers.close()

    def _extrapolate(self, seconds: float, moved: float, rate: float) -> None:
        ranks, slots = 32, (EXPERTS + 32) // 32
        expert = sum(a * b for a, b in expert_shapes(HIDDEN, INNER))
        fixed = max(0.0, (seconds - moved / rate / 1e9) / self.layers)
        total = LAYERS * (fixed + slots * expert / rate / 1e9)
        print(
            f"{ranks} ranks, {LAYERS} layers, {slots} slots a rank of {expert / 1e6:.1f} MB, all of them moved, if pushes are as fast there:\n"
            f"  seconds = layers x (fixed + slots x bytes / rate) = {LAYERS} x ({fixed * 1e3:.1f} ms + {slots} x {expert / 1e6:.1f} MB"
            f" / {rate:.0f} GB/s) = {total:.2f} s\n"
            f"  fixed: what a layer took here beyond its bytes, mostly the margin of steps before its change", flush=True)

    def host(self, name: str) -> None:
        weights = self.weights()
        if self.device.type == "cpu":
            return
        try:
            mover, why = HostMover(name, weights, self.maps, self.device), ""
        except Exception as error:
            mover, why = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        everybody: list = [None] * self.ranks
        dist.all_gather_object(everybody, why)
        if any(everybody):
            if self.rank == 0:
                print(f"{name}: not here: {next(filter(None, everybody))}", flush=True)
            return
        self.rebalance(name, mover.step, mover.begin, lambda: mover.busy, weights)


def run(rank: int, port: int, args: argparse.Namespace) -> None:
    store = dist.TCPStore("127.0.0.1", port, args.ranks, rank == 0, timeout=timedelta(seconds=300))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=args.ranks)
    bench = Bench(rank, args)
    for name in args.transports.split(","):
        bench.ours(store) if name == "ours" else bench.host(name)
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transports", default=",".join(("ours", *NAMES)))
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, (port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
