# SPDX-License-Identifier: Apache-2.0
"""Tokens into compressed rows and index keys.  (v41-facts 4.4, 4.5)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..kernels.paging import write_rows
from .parameters import Plain, RMSNorm
from .settings import Settings
from .step import Pages, Rows


class Compressor(nn.Module):
    """One latent a token (ratio 1), or a gated mean over each pair of tokens (ratio 2).

    A pair's first token waits in `ring` as (projection, gate): pages of width 2 * head_dim in the
    accumulator's dtype, one block a request, addressed by position, so that rejected rows are
    simply overwritten.
    """

    def __init__(self, cfg: ModelConfig, settings: Settings, ratio: int):
        super().__init__()
        self.ratio, self.dtype, self.accumulator = ratio, settings.dtype, settings.accumulator
        self.wkv = Plain(cfg.head_dim, cfg.hidden_size)
        if ratio == 2:
            self.wgate = Plain(cfg.head_dim, cfg.hidden_size)
        self.norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, settings)

    def forward(self, x: torch.Tensor, rows: Rows, ring: Pages | None) -> torch.Tensor:
        """x [T, D] -> latents [T, head_dim]; at ratio 2 a row's latent counts where its position is odd."""
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        x = x.to(self.accumulator)
        state = torch.cat((self.wkv(x), self.wgate(x)), -1)
        first = rows.first_of_request()
        here = torch.arange(rows.count, device=x.device)
        block = ring.block_table[:, 0].long()[rows.req]
        before = ring.cache[block, (rows.positions - 1) % ring.states]
        before = torch.where((here > first)[:, None], state.roll(1, 0), before)
        # Older rows of a long chunk would collide in the ring; only the newest are ever read.
        kept = here >= rows.end_of_request() - ring.states
        write_rows(ring.cache, torch.where(kept, block * ring.states + rows.positions % ring.states, -1), state)
        values, gates = torch.stack((before, state)).chunk(2, -1)
        return self.norm((values * torch.softmax(gates, 0)).sum(0).to(self.dtype))

    def slots(self, rows: Rows, pages: Pages) -> torch.Tensor:
        """State slots [T] of the rows' latents in `pages`, -1 where a row completes no latent."""
        block, offset = pages.slots // pages.block_size, pages.slots % pages.block_size
        complete = (pages.slots >= 0) & ((rows.positions + 1) % self.ratio == 0)
        return torch.where(complete, block * pages.states + offset // self.ratio, -1)
