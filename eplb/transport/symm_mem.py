# SPDX-License-Identifier: Apache-2.0
"""Buffers in torch's symmetric memory: for GPUs of one machine that reach each other's memory.

A push is a plain copy of contiguous bytes to a mapped address of the peer, which the copy engines carry out: no SM, no
multicast, no NVSHMEM, no collective.  Needs torch 2.11 or later with the symmetric memory's CUDA backend.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..board import Board
from . import TransportError, layout, views

# No multicast object is bound for these buffers.  Processes that see one GPU each all call theirs cuda:0, which torch
# takes for one GPU used twice; that it is not is checked here by the GPUs' own names.
RENDEZVOUS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
SHARE_ONE_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # set to 1 by hand: several ranks on one GPU, for tests


def supported(tensors: Sequence[torch.Tensor]) -> tuple[bool, str]:
    """Whether this rank's tensors can use it, and why not."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return False, "symmetric memory holds tensors of one CUDA device only"
    if torch.version.hip:
        return False, "symmetric memory is used on NVIDIA GPUs only"
    try:
        import torch.distributed._symmetric_memory as symm_mem
        from torch._C._distributed_c10d import _SymmetricMemory

        _SymmetricMemory.empty_strided_p2p
        backend = symm_mem.get_backend(next(iter(devices)))
    except (ImportError, AttributeError, RuntimeError) as error:
        return False, f"this torch has no symmetric memory: {error}"
    if backend not in (None, "CUDA"):
        return False, f"symmetric memory's backend is {backend} here. Unset TORCH_SYMMMEM"
    return True, ""


class SymmetricMemory:
    """PeerBuffers of CUDA tensors.  Pushes run on a stream of their own; a thread other than the main one makes them."""

    def __init__(self, device: torch.device, memory: torch.Tensor, handle, ranks: int, tensors: Sequence[torch.Tensor]) -> None:
        self._device, self._memory, self._handle = device, memory, handle
        self._tensors = [views(handle.get_buffer(rank, memory.shape, torch.uint8, 0), tensors) for rank in range(ranks)]
        self._stream = torch.cuda.Stream(device)  # the lowest priority

    @classmethod
    def open(cls, board: Board, tensors: Sequence[torch.Tensor], group, timeout: float = 30.0) -> SymmetricMemory:
        """Buffers shaped as `tensors`, one layer's, which are equal on all ranks (`same_weights`).

        group: the ProcessGroup of the board's ranks, in their order.  Every rank calls it on its main thread, for one
        model after the other in the same order.  Each learns of another's failure.  Raises TransportError.
        """
        ok, why = supported(tensors)
        if ok and (group.rank(), group.size()) != (board.rank, board.ranks):
            why = f"the group's rank {group.rank()} of {group.size()} is the board's {board.rank} of {board.ranks}"
        _agree(board, tensors, why, timeout)
        device, memory, handle = tensors[0].device, None, None
        try:
            import torch.distributed._symmetric_memory as symm_mem
            from torch._C._distributed_c10d import _SymmetricMemory

            # Not `symm_mem.empty`, which may cut it out of a pool whose place differs between ranks.
            memory = _SymmetricMemory.empty_strided_p2p((layout(tensors)[1],), (1,), torch.uint8, device)
        except RuntimeError as error:
            why = f"{layout(tensors)[1]} bytes of symmetric memory: {_first_line(error)}. Lower gpu_memory_utilization"
        _all_good(board, "symm_mem allocated", why, timeout)
        try:
            with _environment(RENDEZVOUS):
                handle = symm_mem.rendezvous(memory, group)
            if getattr(handle, "offset", 0):
                why = "torch gave a buffer inside another one. Unset TORCH_SYMMMEM_IMPLICIT_POOL"
        except RuntimeError as error:
            why = f"the rendezvous failed: {_first_line(error)}. Can the processes' GPUs reach each other (nvidia-smi topo -p2p w)?"
        _all_good(board, "symm_mem mapped", why, timeout)
        return cls(device, memory, handle, board.ranks, tensors)

    def tensors(self, rank: int) -> list[torch.Tensor]:
        return self._tensors[rank]

    def enter(self) -> None:
        torch.cuda.set_device(self._device)  # a new thread's is GPU 0, where a context would take memory

    def push(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)

    def flush(self) -> None:
        mark = torch.cuda.Event(blocking=True)  # sleeps instead of spinning
        mark.record(self._stream)
        mark.synchronize()

    def record(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(blocking=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def wait(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def close(self) -> None:
        self._tensors, self._handle, self._memory = [], None, None


def _agree(board: Board, tensors: Sequence[torch.Tensor], why: str, timeout: float) -> None:
    """Raise TransportError, the same on all ranks, unless all can use it, on one machine, with a GPU each."""
    gpu = "" if why else str(torch.cuda.get_device_properties(tensors[0].device).uuid)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    own = {"why": why, "machine": machine, "gpu": gpu, "shared": os.environ.get(SHARE_ONE_GPU) == "1"}
    said = [json.loads(text) for text in _gather(board, "symm_mem", json.dumps(own).encode(), timeout)]
    for rank, other in enumerate(said):
        if other["why"]:
            raise TransportError(f"rank {rank}: {other['why']}")
        if other["machine"] != said[0]["machine"]:
            raise TransportError(f"rank {rank} is on another machine than rank 0. Experts are moved between GPUs of one machine only")
        if other["gpu"] in [before["gpu"] for before in said[:rank]] and not other["shared"]:
            raise TransportError(f"rank {rank} has a GPU that another rank has, too. Give each rank its own")


def _all_good(board: Board, what: str, why: str, timeout: float) -> None:
    for rank, text in enumerate(_gather(board, what, why.encode() or b"+", timeout)):
        if text != b"+":
            raise TransportError(f"rank {rank}: {text.decode()}")


def _gather(board: Board, what: str, value: bytes, timeout: float) -> list[bytes]:
    try:
        return board.gather(what, value, timeout)
    except TimeoutError as error:
        raise TransportError(str(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """`values` in the environment, for torch's C++ side, and then as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
