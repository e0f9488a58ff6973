# SPDX-License-Identifier: Apache-2.0
"""Which compressed rows a layer reads.  (v41-facts 4.5)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import LayerPlan, ModelConfig
from ..kernels import indexer as ops
from ..kernels.formats.records import Record
from ..kernels.paging import read_rows, slots_of
from .parameters import Fp8Linear, Plain, RMSNorm
from .rope import Rope
from .settings import Settings
from .step import Pages, Step


class Indexer(nn.Module):
    """Index keys on KV sources, queries and the choice on index sources."""

    def __init__(self, cfg: ModelConfig, settings: Settings, plan: LayerPlan, rope: Rope, record: Record):
        super().__init__()
        self.cfg, self.plan, self.rope, self.accumulator = cfg, plan, rope, settings.accumulator
        self.record = record
        if plan.is_kv_source:
            self.wk = Plain(cfg.index_head_dim, cfg.head_dim)
            self.k_norm = RMSNorm(cfg.index_head_dim, cfg.rms_norm_eps, settings)
        self.wq_b = Fp8Linear(cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank, settings)
        self.weights_proj = Plain(cfg.index_n_heads, cfg.hidden_size)

    def keys(self, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """latents before RoPE [T, head_dim], positions of their groups' first tokens -> records [T, width]."""
        return self.record.encode(self.rope(self.k_norm(self.wk(latent)), positions))

    def select(self, x: torch.Tensor, qr: torch.Tensor, step: Step, pages: Pages) -> torch.Tensor:
        """x [T, D], qr [T, q_lora] -> chosen compressed rows int64 [T, k], ascending, -1 at the end.

        Also leaves the candidate rows of a candidate source in `step.candidates`.
        """
        cfg, plan, rows = self.cfg, self.plan, step.rows
        visible = (rows.positions + 1) // plan.ratio
        longest = max(rows.context) // plan.ratio
        blocks = cfg.candidate_topk_blocks * cfg.candidate_block_size
        if longest <= min(cfg.index_topk, blocks):
            if plan.is_candidate_source:
                step.candidates[plan.index] = None
            every = torch.arange(max(longest, 1), device=x.device).expand(rows.count, -1)
            return torch.where(every < visible[:, None], every, -1)
        q = self.wq_b(qr).unflatten(-1, (cfg.index_n_heads, cfg.index_head_dim))
        q = self.record.round(self.rope(q, rows.positions).to(self.accumulator))
        weights = self.weights_proj(x).to(self.accumulator)
        weights = weights * (cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5)
        chosen, kept = [], []
        allowed = step.candidates[cfg.candidate_source_layer_id] if plan.restricted else None
        for r, context in enumerate(rows.context):
            mine = slice(rows.start[r], rows.start[r + 1])
            if mine.start == mine.stop:
                kept.append(torch.empty(0, 0, dtype=torch.bool, device=x.device))
                continue
            score = self._scores(q[mine], weights[mine], visible[mine], r, context // plan.ratio, pages)
            if plan.is_candidate_source:
                kept.append(ops.best_blocks(score, visible[mine], cfg.candidate_topk_blocks, cfg.candidate_block_size))
            if allowed is not None:
                score = score.masked_fill(~allowed[r], float("-inf"))
            chosen.append(ops.best_rows(score, cfg.index_topk))
        if plan.is_candidate_source:
            step.candidates[plan.index] = kept
        return torch.cat(chosen)

    def _scores(self, q, weights, visible, r: int, n: int, pages: Pages) -> torch.Tensor:
        logical = torch.arange(n, device=q.device)[None]
        request = torch.full((1,), r, device=q.device)
        slots = slots_of(pages.block_table, request, logical, pages.states)[0]
        return ops.scores(q, weights, read_rows(pages.cache, slots, self.record, q.dtype), visible)
