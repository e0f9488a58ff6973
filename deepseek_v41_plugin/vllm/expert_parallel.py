# SPDX-License-Identifier: Apache-2.0
"""The experts over the host's expert parallel group: TP ranks hold the same rows, data parallel ranks others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from vllm.distributed import get_dp_group, get_ep_group

from ..model.settings import ExpertRanks, Gathered

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.distributed.parallel_state import GroupCoordinator


def expert_ranks(parallel: ParallelConfig, redundant: int) -> ExpertRanks | None:
    """None: the experts are cut over the tensor parallel ranks, as without --enable-expert-parallel."""
    if not parallel.enable_expert_parallel or parallel.tensor_parallel_size * parallel.data_parallel_size == 1:
        return None
    group = get_ep_group()
    given = {"rank": group.rank_in_group, "size": group.world_size, "redundant": redundant, "all_reduce": sum_over(get_ep_group)}
    if parallel.data_parallel_size == 1:
        return ExpertRanks(**given)
    rows = Rows()
    return ExpertRanks(**given, begin=rows.begin, gather=rows.gather)


def sum_over(group: Callable[[], GroupCoordinator]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sum over a group's ranks: the host's own on GPUs, which its CUDA graphs know, and torch's on a CPU and for 64
    bits, which the exact mode needs and the host's has no kernels for."""

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if not x.numel():  # on all ranks alike
            return x
        if x.is_cuda and x.dtype != torch.float64:
            return group().all_reduce(x)
        dist.all_reduce(x, group=group().device_group)
        return x

    return all_reduce


class Rows:
    """The rows of all data parallel ranks.  All ranks call both methods alike, layer for layer."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def begin(self, count: int) -> None:
        """The next layers run on `count` rows here.  Waits for the other ranks' host threads, not for a device."""
        group = get_dp_group()
        counts = torch.zeros(group.world_size, dtype=torch.int64)
        counts[group.rank_in_group] = count
        dist.all_reduce(counts, group=group.cpu_group)
        self.counts = counts.tolist()

    def gather(self, *tensors: torch.Tensor) -> Gathered:
        """[T, ...] of every rank, rank after rank, in one collective of bytes; ranks with fewer rows pad theirs."""
        group, longest = get_dp_group(), max(self.counts)
        if not longest:
            return list(tensors), slice(None)
        own = [t.flatten(1).contiguous().view(torch.uint8) for t in tensors]
        widths = [t.shape[1] for t in own]
        packed = own[0].new_zeros(longest, sum(widths))
        torch.cat(own, 1, out=packed[: tensors[0].shape[0]])
        everyone = packed.new_empty(group.world_size, *packed.shape)
        dist.all_gather(list(everyone), packed, group=group.device_group)
        everyone = torch.cat([part[:count] for part, count in zip(everyone, self.counts, strict=True)])
        parts = everyone.split(widths, 1)
        rows = [part.contiguous().view(t.dtype).view(-1, *t.shape[1:]) for part, t in zip(parts, tensors, strict=True)]
        first = sum(self.counts[: group.rank_in_group])
        return rows, slice(first, first + self.counts[group.rank_in_group])
