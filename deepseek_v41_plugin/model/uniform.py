# SPDX-License-Identifier: Apache-2.0
"""Routing without preferences, for benches: every row goes to experts as good as drawn at random."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def even_out(model: nn.Module) -> None:
    """Gates forget what they learned: random weights of length 1, no bias; the same on all ranks."""
    from .moe import Gate

    for seed, gate in enumerate(module for module in model.modules() if isinstance(module, Gate)):
        drawn = torch.randn(gate.weight.shape, generator=torch.Generator().manual_seed(seed))
        gate.weight.copy_(nn.functional.normalize(drawn))
        gate.bias.zero_()


def scattered(x: torch.Tensor) -> torch.Tensor:
    """[T, D] -> [T, D]: numbers in -1 to 1 that depend on a row's bits and have nothing else in common with other rows'."""
    return torch.sin(x.to(torch.promote_types(x.dtype, torch.float32)) * 1e4).to(x.dtype)
