# SPDX-License-Identifier: Apache-2.0
"""What the host decides about a model: dtype, shards, record formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

import torch

from ..config import ModelConfig
from ..kernels import invariant


@dataclass(frozen=True)
class Shards:
    """Tensor parallel group: this rank of `size`, and its sum over ranks (identity for one)."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


Gathered = tuple[list[torch.Tensor], slice]


def _own_rows(*rows: torch.Tensor) -> Gathered:
    return list(rows), slice(None)


@dataclass(frozen=True)
class ExpertRanks:
    """Expert parallel group: this rank of `size`, over which the physical experts are cut in equal parts.

    redundant: physical experts beyond the logical ones (`eplb.maps.initial` says which they repeat).
    begin(T): the layers that follow run on T rows.  gather(*tensors [T, ...]) -> those of all ranks, one after
    the other, and the slice of this rank's; the rows alone where all ranks hold the same.  all_reduce: the sum
    over the group.
    """

    rank: int = 0
    size: int = 1
    redundant: int = 0
    begin: Callable[[int], None] = lambda count: None
    gather: Callable[..., Gathered] = _own_rows
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


@dataclass(frozen=True)
class Settings:
    """dtype of the activations (bfloat16, float32; float64 is the exact mode), and shards.

    `experts`: the ranks that routed experts are cut over; None: those of `shards`.

    `cache`: record formats, see `kernels.formats.records.cache_format`.
    `activation_quant`: round the inputs of FP8 Linears and experts to FP8, as in training.
    `batch_invariant`: a row's bits do not depend on the rows beside it (`kernels.invariant`).
    `uniform_routing`: experts at random, for benches (`model.uniform`).
    """

    dtype: torch.dtype = torch.bfloat16
    activation_quant: bool = True
    cache: str = "auto"
    shards: Shards = field(default_factory=Shards)
    batch_invariant: bool = False
    experts: ExpertRanks | None = None
    uniform_routing: bool = False

    @property
    def expert_ranks(self) -> ExpertRanks:
        own = self.shards
        return self.experts or ExpertRanks(own.rank, own.size, all_reduce=own.all_reduce)

    @property
    def accumulator(self) -> torch.dtype:
        """float32, or float64 in exact mode."""
        return torch.promote_types(self.dtype, torch.float32)


def as_set(method: Callable) -> Callable:
    """Decorator of a model's methods: the arithmetic is batch-invariant if `self.settings` say so."""

    @wraps(method)
    def run(self, *args, **kwargs):
        with invariant.switched(self.settings.batch_invariant):
            return method(self, *args, **kwargs)

    return run


def shards_problem(cfg: ModelConfig, size: int, experts: bool = True) -> str | None:
    """Why the model cannot be cut over `size` tensor parallel ranks, or None; experts: the routed ones too."""
    for field in ("num_attention_heads", "o_groups", *(("n_routed_experts",) if experts else ())):
        if getattr(cfg, field) % size:
            return f"{size} does not divide {field} = {getattr(cfg, field)}. Use a size that divides it"
    for field, width in (("moe_intermediate_size", cfg.moe_intermediate_size), ("o_lora_rank", cfg.o_groups * cfg.o_lora_rank)):
        if width % (32 * size):
            return f"{size} cuts {field} inside a block of 32. Use a smaller size"
    return None
