# SPDX-License-Identifier: Apache-2.0
"""Counts of drafting, from the worker that makes them to the host's /metrics.

The worker's first rank keeps a small file of int64 per engine; the process that serves /metrics reads it
when it is scraped.  No file (another node, a worker that has not begun): no samples.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import stat
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..verification import Tally
from .host_copy import HostCopy, copy_stream
from .patching import wrap

if TYPE_CHECKING:
    from prometheus_client.multiprocess import MultiProcessCollector
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.dsv41")

PATCHES = ("prometheus_client.multiprocess.MultiProcessCollector.collect",)
LAUNCHED = "DSV41_LAUNCHED"  # pid:instance of the process that launched the engines, for its API servers

# In the file's order: name, what it counts.  Two more rows of k follow: verified and accepted by position.
TOTALS = (
    ("drafted", "Drafts that lay ready"),
    ("verified", "Drafts verified"),
    ("accepted", "Drafts accepted"),
    ("budget", "Sum of the steps' budgets of drafts to verify"),
    ("saved_rows", "Drafts that lay ready and were not verified"),
    ("steps", "Steps counted"),
    ("skipped_draft_passes", "Steps after which the draft pass was left out"),
)


def folder() -> Path:
    """The user's own directory for these files.  Raises OSError if somebody else prepared it."""
    path = Path(tempfile.gettempdir()) / f"dsv41-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{path}: not a directory of this user alone. Remove it, or set TMPDIR")
    return path


def file_name(instance_id: str, engine: int) -> str:
    """instance.engine.pid.  Data parallel engines add their rank to the instance's name; the reader knows
    the instance only."""
    return f"{re.sub(r'_dp[0-9]+$', '', instance_id)}.{engine}.{os.getpid()}"


def sweep() -> None:
    """Remove the files of workers that were killed with their servers."""
    for path in folder().glob("*.*.*"):
        pid = path.name.rpartition(".")[2]
        if not pid.isdigit():
            continue
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except OSError:
            continue


class StepCounts:
    """The worker's side: counts steps without waiting for the device, and keeps the file.

    A step's accepts are copied while it goes on and counted once they have arrived.
    """

    def __init__(self, k: int, device: torch.device, path: Path | None):
        self.tally, self.skipped = Tally(k), 0
        self._stream = copy_stream(device)
        self._copies: deque[tuple[int | None, int, HostCopy]] = deque()
        self._file = None
        if path is not None:
            self._file = np.memmap(path, np.int64, "w+", shape=(len(TOTALS) + 2 * k,))
            weakref.finalize(self, path.unlink, missing_ok=True)

    @classmethod
    def of(cls, vllm_config: VllmConfig, device: torch.device, rank: int) -> StepCounts:
        """With a file on rank 0; without one, and with a warning, if it cannot be made."""
        path = None
        if rank == 0:
            try:
                sweep()
                path = folder() / file_name(vllm_config.instance_id, vllm_config.parallel_config.data_parallel_index)
            except OSError as error:
                logger.warning("No vllm:dsv41_ metrics: %s", error)
        return cls(vllm_config.speculative_config.num_speculative_tokens, device, path)

    def reset(self) -> None:
        """Forget all steps so far."""
        self.tally, self.skipped = Tally(self.tally.k), 0
        self._copies.clear()

    def add(
        self, num_sampled: torch.Tensor, num_rejected: torch.Tensor, budget: int, drafted: int | None, draft: bool
    ) -> None:
        """A step: tokens sampled and drafts rejected of each request, int [R]; drafted: those that lay
        ready (None: all that were verified); draft: whether the draft pass ran after it."""
        self.skipped += not draft
        self._copies.append((drafted, budget, HostCopy(torch.stack((num_sampled, num_rejected)), self._stream)))
        while self._copies and self._copies[0][2].arrived():
            self._count(*self._copies.popleft())
        if self._file is not None:
            tally = self.tally
            totals = [*(getattr(tally, name) for name, _ in TOTALS[:-1]), self.skipped]
            self._file[:] = np.concatenate((totals, tally.verified_by_position, tally.accepted_by_position))

    def _count(self, drafted: int | None, budget: int, copy: HostCopy) -> None:
        sampled, rejected = copy.wait()
        accepted = np.maximum(sampled - 1, 0)  # a request in the middle of its prompt samples none
        verified = np.maximum(sampled + rejected - 1, 0)
        self.tally.add(budget, verified if drafted is None else np.array([drafted]), verified, accepted)


class Collector:
    """The server's side: a prometheus collector of all engines that this process launched."""

    def __init__(self) -> None:
        self.engines: dict[str, str] = {}  # instance -> name of its model

    def describe(self) -> Iterator:
        return iter(())

    def collect(self) -> Iterator:
        from prometheus_client.core import CounterMetricFamily

        from . import balance_log

        labels = ["model_name", "engine"]
        totals = [CounterMetricFamily(f"vllm:dsv41_{name}", text + ".", labels=labels) for name, text in TOTALS]
        positions = [
            CounterMetricFamily(f"vllm:dsv41_{name}_per_pos", f"Drafts {name}, by position.", labels=[*labels, "position"])
            for name in ("verified", "accepted")
        ]
        for model, engine, counts in self._read():
            for family, value in zip(totals, counts, strict=False):
                family.add_metric([model, engine], value)
            for family, values in zip(positions, np.split(counts[len(TOTALS) :], 2), strict=True):
                for i, value in enumerate(values):
                    family.add_metric([model, engine, str(i)], value)
        yield from (*totals, *positions)
        yield from balance_log.families(self._paths("eplb-*."))

    def clean(self) -> None:
        """Remove the files of workers that were killed."""
        for _, path in (*self._paths(), *self._paths("eplb-*.")):
            path.unlink(missing_ok=True)

    def _paths(self, prefix: str = "") -> Iterator[tuple[str, Path]]:
        """(model, file) of each engine that has one."""
        try:
            where = folder()
        except OSError:
            return
        for instance, model in self.engines.items():
            yield from ((model, path) for path in sorted(where.glob(f"{prefix}{instance}.*")))

    def _read(self) -> Iterator[tuple[str, str, np.ndarray]]:
        for model, path in self._paths():
            try:
                counts = np.fromfile(path, np.int64)
            except OSError:
                continue
            if len(counts) > len(TOTALS):
                yield model, path.name.split(".")[1], counts


_collector: Collector | None = None


def expose(vllm_config: VllmConfig) -> None:
    """Have this process's /metrics show the engine of `vllm_config`, which is being launched.

    With several API servers each has a config of its own; what they show is the engine of their launcher's.
    """
    global _collector
    from prometheus_client import REGISTRY, multiprocess

    if _collector is None:
        _collector = Collector()
        REGISTRY.register(_collector)
        atexit.register(_collector.clean)
    instance = vllm_config.instance_id
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        wrap(multiprocess.MultiProcessCollector, "collect", _collect)
        launcher, _, launched = os.environ.get(LAUNCHED, "").partition(":")
        if launcher == str(os.getppid()):
            instance = launched
            atexit.unregister(_collector.clean)  # the launcher's
        else:
            os.environ[LAUNCHED] = f"{os.getpid()}:{instance}"
    model = vllm_config.model_config.served_model_name
    _collector.engines[instance] = model[0] if isinstance(model, list) else model


def _collect(original, host: MultiProcessCollector) -> Iterator:
    """Several API servers show a registry made anew, with one collector that reads prometheus's own files."""
    yield from original(host)
    yield from _collector.collect()
