# SPDX-License-Identifier: Apache-2.0
"""The host's way of moving experts, driven as its asynchronous worker drives it, for bench/eplb_transport.py."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

NAMES = ("torch_gloo", "pynccl", "nixl")


class HostMover:
    """One rank.  `begin` starts a rebalance to `new` [L, P]; `step` is what the main thread pays before each step.

    The worker moves a layer into the buffer and waits until it is taken out; the main threads agree by an all-reduce in
    every step of a rebalance whether all have a layer, and take it out in that step.
    """

    def __init__(self, name: str, weights: Sequence[Sequence[torch.Tensor]], maps: np.ndarray, device: torch.device) -> None:
        from vllm.distributed.eplb import eplb_communicator as host
        from vllm.distributed.eplb import rebalance_execute

        self.execute, self.weights, self.maps, self.device = rebalance_execute, weights, maps.copy(), device
        self.buffer = [torch.empty_like(tensor) for tensor in weights[0]]
        self.group, self.flags = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        if name == "torch_gloo":
            self.communicator = host.TorchDistGlooStagedEplbCommunicator(cpu_group=self.group)
        elif name == "nixl":
            self.communicator = host.NixlEplbCommunicator(
                cpu_group=self.group, all_expert_weights=weights, expert_buffer=self.buffer)
        else:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

            self.communicator = host.PyNcclEplbCommunicator(pynccl_comm=PyNcclCommunicator(self.group, device))
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.busy, self.pending, self.taken, self.error = False, None, threading.Event(), None

    def begin(self, new: np.ndarray) -> None:
        self.busy, self.new = True, new
        threading.Thread(target=self._work, daemon=True).start()

    def step(self) -> None:
        if self.error:
            raise self.error
        if not self.busy:
            return
        flag = torch.tensor([int(self.pending is not None)], dtype=torch.int32)
        dist.all_reduce(flag, group=self.flags)
        if flag.item() == dist.get_world_size():
            layer, metadata = self.pending
            self.execute.move_from_buffer(
                expert_weights=self.weights[layer], expert_weights_buffers=self.buffer, transfer_metadata=metadata,
                new_indices=self.new[layer], ep_rank=dist.get_rank())
            if self.stream is not None:
                self.mark = torch.cuda.current_stream().record_event()
            self.pending = None
            self.busy = layer + 1 < len(self.new)
            self.taken.set()

    def _work(self) -> None:
        try:
            if self.stream is not None:
                torch.cuda.set_device(self.device)
                self.communicator.set_stream(self.stream)
            for layer, new in enumerate(self.new):
                metadata = self.execute.transfer_layer(
                    old_layer_indices=torch.from_numpy(self.maps[layer]), new_layer_indices=torch.from_numpy(new),
                    expert_weights=self.weights[layer], expert_weights_buffer=self.buffer, ep_group=self.group,
                    communicator=self.communicator, stream=self.stream, layer_idx=layer)
                if self.stream is not None:
                    self.stream.synchronize()
                self.taken.clear()
                self.pending = (layer, metadata)
                self.taken.wait()
                if self.stream is not None:
                    self.stream.wait_event(self.mark)
            self.maps = self.new
        except Exception as error:
            self.error = error
