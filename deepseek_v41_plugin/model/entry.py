# SPDX-License-Identifier: Apache-2.0
"""How tokens enter a stack of layers: embedded, once for each copy of the stream.  (v41-facts 3)"""

from __future__ import annotations

import torch
from torch import nn

from .mhc import Residual
from .parameters import raw
from .settings import Settings


class Table(nn.Module):
    """`weight` bf16 [rows, D]: the embedding or the output head, whole on every rank."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.weight = raw((rows, dim), torch.bfloat16)


def enter(input_ids: torch.Tensor, embed: Table, copies: int, settings: Settings) -> Residual:
    """input_ids int [T] -> the stream before the first layer."""
    embedded = nn.functional.embedding(input_ids, embed.weight).to(settings.dtype)
    stream = embedded[:, None].repeat(1, copies, 1)
    pre = torch.zeros(stream.shape[:2], dtype=settings.accumulator, device=stream.device)
    pre[:, 0] = 1
    return Residual(stream, pre)
