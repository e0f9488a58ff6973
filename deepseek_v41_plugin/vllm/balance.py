# SPDX-License-Identifier: Apache-2.0
"""Expert parallel load balancing in a worker: target and draft side by side, each with its own experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank

from ..eplb import maps
from ..eplb.loads import Loads
from ..eplb.rebalancer import Rebalancer
from ..eplb.schedule import Schedule
from ..eplb.simulate import POLICIES
from ..kernels.moe import Replicas
from .balance_log import BalanceLog
from .balance_peers import open_board, open_peers
from .host_copy import HostCopy, copy_stream
from .options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.parallel import EPLBConfig

    from ..model.moe import MoE
    from ..model.settings import ExpertRanks


# Steps from the agreement on a layer to its change: one whole step for the ranks' workers to agree in.
MARGIN = 2


def policy_of(options: Options, ranks: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """policy(load [L, E], maps [L, P]) -> maps [L, P]."""
    slack = {"slack": options.eplb_slack} if options.eplb_policy == "fewest_moves" else {}
    return partial(POLICIES[options.eplb_policy], ranks=ranks, **slack)


class Maps:
    """Where one model's experts are, on its device: vLLM's three maps, which the routing kernels read.

    physical_to_logical int64 [L, P], slots int64 [L, E, S], counts int64 [L, E].
    """

    def __init__(self, layers: int, experts: int, redundant: int, device: torch.device):
        self.held = np.tile(maps.initial(experts, redundant), (layers, 1))
        self.experts, self.width = experts, redundant + 1
        self._pin = device.type == "cuda"
        both = maps.logical_maps(self.held, experts, self.width)
        self.physical_to_logical, self.slots, self.counts = (torch.from_numpy(x).to(device) for x in (self.held.copy(), *both))

    def switch(self, layer: int, row: np.ndarray) -> None:
        """The layer's slots hold `row` int64 [P] from the next forward on."""
        slots, counts = maps.logical_maps(row[None], self.experts, self.width)
        for target, source in ((self.physical_to_logical, row), (self.slots, slots[0]), (self.counts, counts[0])):
            source = torch.from_numpy(source)
            target[layer].copy_(source.pin_memory() if self._pin else source, non_blocking=True)


class ModelBalance:
    """One model: its maps, its loads, when it is rebalanced, and what moves its experts."""

    def __init__(self, name: str, layers: list[MoE], config: EPLBConfig, ranks: ExpertRanks, vllm_config: VllmConfig):
        options = Options.parse(vllm_config.additional_config)
        held = [layer.experts for layer in layers]
        self.device, experts = held[0].w13.device, layers[0].gate.weight.shape[0]
        self.maps = Maps(len(layers), experts, ranks.redundant, self.device)
        self.schedule = Schedule(config.window_size, config.step_interval)
        self.loads = Loads(len(layers), experts, experts + ranks.redundant, self.device, self.schedule.intervals)
        self.record = torch.zeros((), dtype=torch.bool, device=self.device)
        self.recording = False
        self._counts = get_tensor_model_parallel_rank() == 0  # the others route the same rows
        # All of them, until a step says how many it has (`moe.count_rows`).
        rows = torch.tensor(np.iinfo(np.int32).max, dtype=torch.int32, device=self.device)
        for index, layer in enumerate(layers):
            layer.replicas = Replicas(
                self.maps.slots[index], self.maps.counts[index], self.loads.counts[index], self.record, rows,
                vllm_config.parallel_config.data_parallel_rank,
            )
        weights = [[x.data for x in (e.w13, e.w13_scale, e.w2, e.w2_scale)] for e in held]
        self.log = BalanceLog.of(name, vllm_config, ranks, sum(x[0].numel() * x.element_size() for x in weights[0]), options)
        self._stream, self.rebalancer = copy_stream(self.device), None
        board = open_board(name, options.eplb_timeout)
        peers = open_peers(options.eplb_transport, board, weights, options.eplb_timeout)
        if peers is None:
            return
        self.rebalancer = Rebalancer(
            name, weights, self.maps.held, ranks.rank, ranks.size, board, peers,
            self.log.watched(policy_of(options, ranks.size)), self.maps.switch,
            timeout=options.eplb_timeout, margin=MARGIN, wait=not config.use_async, on_event=self.log.event,
        )

    def step(self, is_dummy: bool) -> None:
        """A forward pass is over, on all ranks; a dummy one served nobody here."""
        if self.rebalancer is None:
            return
        if self.recording:
            if is_dummy:
                self.loads.drop()
            else:
                self.loads.add(self.maps.physical_to_logical)
        self.rebalancer.step()
        if self.schedule.tick():
            self.rebalancer.begin(HostCopy(self.loads.window(), self._stream).wait)
            self.loads.next_interval()
        if self.recording != self.schedule.recording:
            self.recording = self.schedule.recording
            self.record.fill_(self.recording and self._counts)
