# SPDX-License-Identifier: Apache-2.0
"""From the experts that a router chose to the slots that hold them, and how often each slot was chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# 2^32 over the golden ratio: row t's point in [0, 1) is (t * GOLDEN mod 2^32) / 2^32.
GOLDEN = 2654435769


@dataclass(frozen=True)
class Replicas:
    """Where the E experts of a layer lie among P physical slots. All tensors are on the router's device.

    `slots` int64 or int32 [E, S]: the slots of each expert, `counts[e]` of them (1 to S), anything behind them.
    `counts` of the same kind [E].  `load` int32 [P], added to in place: how often each slot was chosen.
    `record` bool []: whether it is added to.  `rows` int32 []: rows from there on are padding, mapped but not
    counted.  `first`: where this rank's rows begin in the sequence that chooses among replicas, so that the ranks
    of a group, each with a row or two, do not all choose the same.  A layer's five tensors stay where they are and may be written between calls, also in a CUDA graph.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    load: torch.Tensor
    record: torch.Tensor
    rows: torch.Tensor
    first: int = 0

    def __post_init__(self):
        if self.slots.dim() != 2 or self.counts.shape != self.slots.shape[:1]:
            raise ValueError(f"slots and counts: give [E, S] and [E], not {[*self.slots.shape]} and {[*self.counts.shape]}")
        for name, dtype, dim in (("load", torch.int32, 1), ("record", torch.bool, 0), ("rows", torch.int32, 0)):
            x = getattr(self, name)
            if x.dtype != dtype or x.dim() != dim:
                raise ValueError(f"{name}: give {dtype} of {dim} dimensions, not {x.dtype} of {x.dim()}")


def place(experts: torch.Tensor, replicas: Replicas) -> torch.Tensor:
    """The slots of chosen experts [T, k] -> int64 [T, k]; `load` counts them.

    Row t of the call takes replica floor(count * frac((first + t) / golden ratio)) of its experts: the most even of
    sequences in any run of rows, and the same in every run of the program.  Nothing is read back.
    """
    t = torch.arange(experts.shape[0], device=experts.device)[:, None]
    which = ((replicas.first + t) * GOLDEN % 2**32 * replicas.counts[experts]) >> 32
    slots = replicas.slots[experts, which].long()
    counted = ((t < replicas.rows) & replicas.record).int().expand_as(slots)
    replicas.load.index_add_(0, slots.flatten(), counted.flatten())
    return slots
