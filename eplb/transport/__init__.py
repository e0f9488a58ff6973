# SPDX-License-Identifier: Apache-2.0
"""How expert weights get into a peer's one-layer buffer. `PeerBuffers` is what the rebalancer asks of a transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..board import Board


class TransportError(RuntimeError):
    """No buffers: the model is served with the experts where they are."""


class PeerBuffers(Protocol):
    """One-layer buffers of all ranks, each mapped here.  One thread pushes; another records.

    A buffer has one tensor for each of a layer's weight tensors, of its shape [local, ...] and dtype.
    """

    def tensors(self, rank: int) -> list[torch.Tensor]:
        """The buffer of `rank`; of one's own rank too."""

    def enter(self) -> None:
        """The calling thread is the one that will push."""

    def push(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Start to copy `src`, a weight here, into `dst`, a part of some rank's buffer."""

    def flush(self) -> None:
        """Wait until all pushes from here are complete, and visible to the peers that learn of it."""

    def record(self) -> Any:
        """A mark behind everything the calling thread has queued on its device; the main thread's."""

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached `mark`; another thread's."""

    def close(self) -> None:
        """Let go of the buffers.  Peers may still hold theirs."""


def layout(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor lies in one buffer, and the buffer's bytes: every start is a multiple of 256."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // 256) * 256
    return starts, end


def views(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """uint8 [bytes] cut as `layout` says, with the shapes and dtypes of `tensors`."""
    starts, _ = layout(tensors)
    return [
        flat[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors)
    ]


def same_weights(board: Board, weights: Sequence[Sequence[torch.Tensor]], timeout: float) -> None:
    """Check that every layer of every rank has tensors of equal shapes and dtypes, before anything is allocated.

    Raises TransportError with the rank and the field, the same on all ranks up to which difference comes first.
    """
    def signature(tensors: Sequence[torch.Tensor]) -> dict:
        return {f"tensor {i}": [str(t.dtype).removeprefix("torch."), *t.shape] for i, t in enumerate(tensors)}

    mine: dict = {"layers": len(weights), "tensors": len(weights[0]) if weights else 0, **(signature(weights[0]) if weights else {})}
    fault = None if weights else "no layers. Move experts of models that have some"
    for layer, tensors in enumerate(weights):
        if signature(tensors) != signature(weights[0]):
            fault = fault or f"layer {layer} has {signature(tensors)}, layer 0 has {signature(weights[0])}. Quantize all layers alike"
        for i, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                fault = fault or f"layer {layer}, tensor {i} is not contiguous. Lay it out slot by slot"
    theirs = [json.loads(value) for value in board.gather("weights", json.dumps({"fault": fault, **mine}).encode(), timeout)]
    for rank, other in enumerate(theirs):
        for field in dict.fromkeys((*theirs[0], *other)):
            if field == "fault" and other[field]:
                raise TransportError(f"rank {rank}: {other[field]}")
            if other.get(field) != theirs[0].get(field):
                raise TransportError(
                    f"rank {rank}, {field}: {other.get(field)}, but rank 0 has {theirs[0].get(field)}. "
                    "Give every rank the same model, quantization and number of slots"
                )
