# SPDX-License-Identifier: Apache-2.0
"""What the host decides about a model: dtype, shards, record formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..config import ModelConfig


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


def shards_problem(cfg: ModelConfig, size: int) -> str | None:
    """Why the model cannot be cut over `size` tensor parallel ranks, or None."""
    for field in ("num_attention_heads", "o_groups", "n_routed_experts"):
        if getattr(cfg, field) % size:
            return f"{size} does not divide {field} = {getattr(cfg, field)}. Use a size that divides it"
    for field, width in (("moe_intermediate_size", cfg.moe_intermediate_size), ("o_lora_rank", cfg.o_groups * cfg.o_lora_rank)):
        if width % (32 * size):
            return f"{size} cuts {field} inside a block of 32. Use a smaller size"
    return None
