# SPDX-License-Identifier: Apache-2.0
"""Tokens into compressed rows.  (v41-facts 4.4)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..kernels.latent import pair_latents
from ..kernels.linear import wide_linear
from .parameters import Plain, RMSNorm
from .settings import Settings
from .step import Pages, Rows


class Compressor(nn.Module):
    """One latent a token (ratio 1), or a gated mean over each pair of tokens (ratio 2).

    A pair's first token waits in `ring` as (projection, gate): pages of width 2 * head_dim in the
    accumulator's dtype, one block a request, addressed by position, so that rejected rows are
    simply overwritten.  joined: once prepared, both projections as one.
    """

    joined: torch.Tensor | None = None

    def __init__(self, cfg: ModelConfig, settings: Settings, ratio: int):
        super().__init__()
        self.ratio, self.dtype = ratio, settings.dtype
        self.wkv = Plain(cfg.head_dim, cfg.hidden_size)
        if ratio == 2:
            self.wgate = Plain(cfg.head_dim, cfg.hidden_size)
        self.norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, settings)

    def prepare(self) -> None:
        """wkv and wgate become parts of one weight."""
        if self.ratio == 2 and self.joined is None:
            self.joined = torch.cat((self.wkv.weight.data, self.wgate.weight.data))
            self.wkv.weight.data, self.wgate.weight.data = self.joined.chunk(2)

    def forward(self, x: torch.Tensor, rows: Rows, ring: Pages | None) -> torch.Tensor:
        """x [T, D] -> latents [T, head_dim] before their norm; at ratio 2 a row's latent counts where its position is odd."""
        if self.ratio == 1:
            return self.wkv(x)
        if self.joined is None:
            state = torch.cat((wide_linear(x, self.wkv.weight), wide_linear(x, self.wgate.weight)), -1)
        else:
            state = wide_linear(x, self.joined)
        return pair_latents(state, rows.positions, rows.req, rows.first, ring.cache, ring.block_table).to(self.dtype)
