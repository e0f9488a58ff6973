# SPDX-License-Identifier: Apache-2.0
"""What users see of expert balancing: the log, /metrics, and recorded loads.  Kept by rank 0 of the group."""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from ..eplb import maps, simulate
from ..eplb.balance import balancedness
from . import metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..eplb.rebalancer import Rebalancer
    from ..model.settings import ExpertRanks
    from .options import Options

logger = logging.getLogger("vllm.dsv41")

HOTTEST = 4
RECORDED = 256  # windows
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]

# name, kind, text.  From `Shown`, one sample a model.
FAMILIES = (
    ("balancedness", "gauge", "Mean over maximum of the ranks' rows, mean over layers: the last window, as it ran"),
    ("balancedness_planned", "gauge", "The same rows under the maps that were then planned"),
    ("moved_experts", "counter", "Experts moved to another rank, over all ranks and layers"),
    ("moved_bytes", "counter", "Bytes of those"),
    ("rebalances", "counter", "Rebalances begun"),
    ("rebalances_finished", "counter", "Rebalances that got to the last layer"),
    ("rebalances_superseded", "counter", "Rebalances that ended early since the next one was due"),
    ("rebalances_failed", "counter", "Rebalances given up"),
    ("rebalance_seconds", "counter", "Time from begin to end of rebalances, in which the server may have been idle"),
    ("last_rebalance_seconds", "gauge", "Time of the last one"),
    ("watchdog_events", "counter", "Waits for a rank that took too long"),
)


@dataclass
class Shown:
    """The numbers behind FAMILIES, and the mean number of replicas of each layer's hottest experts."""

    balancedness: float = 1.0
    balancedness_planned: float = 1.0
    moved_experts: int = 0
    moved_bytes: int = 0
    rebalances: int = 0
    rebalances_finished: int = 0
    rebalances_superseded: int = 0
    rebalances_failed: int = 0
    rebalance_seconds: float = 0.0
    last_rebalance_seconds: float = 0.0
    watchdog_events: int = 0
    hottest_replicas: list[float] = field(default_factory=list)


class BalanceLog:
    """Of one model on one rank; a silent one on ranks other than 0, but for warnings."""

    def __init__(self, name: str, ranks: int, expert_bytes: int, path: Path | None, record: Path | None):
        self.name, self.ranks, self.expert_bytes, self.path, self.record = name, ranks, expert_bytes, path, record
        if path is not None:
            weakref.finalize(self, path.unlink, missing_ok=True)
        self.shown, self.loads, self._crossing, self._begun = Shown(), deque(maxlen=RECORDED), np.zeros(0, np.int64), 0.0

    @classmethod
    def of(cls, name: str, vllm_config: VllmConfig, ranks: ExpertRanks, expert_bytes: int, options: Options) -> BalanceLog:
        path = record = None
        if ranks.rank == 0:
            record = options.eplb_record and Path(options.eplb_record)
            if record and name != "target":
                record = record.with_stem(f"{record.stem}-{name}")
            try:
                metrics.sweep()
                engine = metrics.file_name(vllm_config.instance_id, vllm_config.parallel_config.data_parallel_index)
                path = metrics.folder() / f"eplb-{name}.{engine}"
            except OSError as error:
                logger.warning("No vllm:dsv41_eplb_ metrics: %s", error)
        return cls(name, ranks.size, expert_bytes, path, record)

    def watched(self, policy: Policy) -> Policy:
        """`policy`, with what it sees and says shown."""

        def plan(load: np.ndarray, old: np.ndarray) -> np.ndarray:
            new = policy(load, old)
            self.shown.balancedness = float(balancedness(load, old, self.ranks).mean())
            self.shown.balancedness_planned = float(balancedness(load, new, self.ranks).mean())
            self._crossing = simulate.crossing(old, new, self.ranks)
            replicas = maps.logical_maps(new, load.shape[1], new.shape[1])[1]
            hottest = np.argsort(-load, axis=1, kind="stable")[:, :HOTTEST]
            self.shown.hottest_replicas = np.take_along_axis(replicas, hottest, 1).mean(0).tolist()
            if self.record:
                self._save(load, old.shape[1])
            return new

        return plan

    def _save(self, load: np.ndarray, slots: int) -> None:
        self.loads.append(load.astype(np.int64))
        try:
            simulate.save(
                self.record, np.stack(self.loads), name=self.name,
                ranks=self.ranks, redundant=slots - load.shape[1], expert_bytes=self.expert_bytes,
            )
        except OSError as error:
            logger.error("EPLB %s: loads are not recorded: %s", self.name, error)
            self.record = None

    def event(self, kind: str, **fields) -> None:
        """From the rebalancer, mostly on its thread."""
        shown = self.shown
        if kind == "watchdog":
            shown.watchdog_events += 1
            logger.warning("EPLB %s: %s; serving goes on with the experts where they are", self.name, fields["text"])
        elif kind == "off":
            logger.error("EPLB %s: no more rebalancing: %s", self.name, fields["reason"])
        elif kind == "begin":
            shown.rebalances += 1
            self._begun = time.monotonic()
        elif kind == "layer" and self.path:
            crossing = int(self._crossing[fields["layer"]])
            shown.moved_experts += crossing
            shown.moved_bytes += crossing * self.expert_bytes
        elif kind in ("finished", "abandoned"):
            self._end(kind, fields)
        if self.path and kind != "layer":
            self._write()

    def _end(self, kind: str, fields: dict) -> None:
        shown = self.shown
        shown.last_rebalance_seconds = time.monotonic() - self._begun
        shown.rebalance_seconds += shown.last_rebalance_seconds
        if kind == "finished":
            shown.rebalances_finished += 1
            if self.path and fields["layers"]:
                logger.info(
                    "EPLB %s: rebalanced %d layers in %.2f s, balancedness %.3f -> %.3f, %.1f MB moved so far",
                    self.name, fields["layers"], shown.last_rebalance_seconds, shown.balancedness, shown.balancedness_planned, shown.moved_bytes / 1e6,
                )
        elif fields["superseded"]:
            shown.rebalances_superseded += 1
            if self.path:
                logger.info("EPLB %s: a rebalance ended early, the next one was due. Raise step_interval", self.name)
        else:
            shown.rebalances_failed += 1
            logger.warning("EPLB %s: a rebalance was given up: %s", self.name, fields["reason"])

    def _write(self) -> None:
        new = self.path.with_name("." + self.path.name)
        try:
            new.write_text(json.dumps({"name": self.name, **asdict(self.shown)}))
            os.replace(new, self.path)
        except OSError as error:
            logger.warning("No more vllm:dsv41_eplb_ metrics: %s", error)
            self.path = None


def families(files: Iterable[tuple[str, Path]]) -> Iterator:
    """Prometheus families of (model, file) pairs."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["model_name", "engine", "part"]
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    out = {name: kinds[kind](f"vllm:dsv41_eplb_{name}", text + ".", labels=labels) for name, kind, text in FAMILIES}
    text = "Replicas of the experts with the most rows, mean over layers, hottest first."
    hottest = GaugeMetricFamily("vllm:dsv41_eplb_hottest_replicas", text, labels=[*labels, "position"])
    for model, path in files:
        try:
            shown = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        of = [model, path.name.split(".")[2], shown["name"]]
        for name, family in out.items():
            family.add_metric(of, shown[name])
        for position, value in enumerate(shown["hottest_replicas"]):
            hottest.add_metric([*of, str(position)], value)
    yield from (*out.values(), hottest)
