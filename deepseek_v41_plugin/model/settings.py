"""What the host decides about a model: dtype, shards, record formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Shards:
    """Tensor parallel group: this rank of `size`, and its sum over ranks (identity for one)."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


@dataclass(frozen=True)
class Settings:
    """dtype of the activations (bfloat16, float32; float64 is the exact mode), and shards.

    `cache`: record formats, see `kernels.formats.records.cache_format`.
    `activation_quant`: round the inputs of FP8 Linears and experts to FP8, as in training.
    """

    dtype: torch.dtype = torch.bfloat16
    activation_quant: bool = True
    cache: str = "auto"
    shards: Shards = field(default_factory=Shards)

    @property
    def accumulator(self) -> torch.dtype:
        """float32, or float64 in exact mode."""
        return torch.promote_types(self.dtype, torch.float32)
