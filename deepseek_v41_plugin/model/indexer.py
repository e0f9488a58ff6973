# SPDX-License-Identifier: Apache-2.0
"""Which compressed rows a layer reads.  (v41-facts 4.5)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import LayerPlan, ModelConfig
from ..kernels import indexer as ops
from ..kernels.formats.records import Record
from ..kernels.paging import Paged
from .parameters import Fp8Linear, Hidden, Plain, RMSNorm
from .settings import Settings
from .step import Pages, Step


class Indexer(nn.Module):
    """Index keys on KV sources, queries and the choice on index sources."""

    def __init__(self, cfg: ModelConfig, settings: Settings, plan: LayerPlan, record: Record):
        super().__init__()
        self.cfg, self.plan, self.accumulator = cfg, plan, settings.accumulator
        self.record = record
        if plan.is_kv_source:
            self.wk = Plain(cfg.index_head_dim, cfg.head_dim)
            self.k_norm = RMSNorm(cfg.index_head_dim, cfg.rms_norm_eps, settings)
        self.wq_b = Fp8Linear(cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank, settings)
        self.weights_proj = Plain(cfg.index_n_heads, cfg.hidden_size)

    def select(self, x: torch.Tensor, qr: Hidden, freq: torch.Tensor, step: Step, keys: Pages) -> torch.Tensor:
        """x [T, D], qr [T, q_lora], freq of RoPE -> chosen compressed rows int32 [T, k], ascending, -1 at the end.

        Also leaves a candidate source's blocks in `step.candidates`.
        """
        cfg, plan, rows = self.cfg, self.plan, step.rows
        q = self.wq_b(qr).unflatten(-1, (cfg.index_n_heads, cfg.index_head_dim))
        weights = self.weights_proj(x).to(self.accumulator) * (cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5)
        candidates = (cfg.candidate_topk_blocks, cfg.candidate_block_size)
        chosen, blocks = ops.select(
            q, weights, rows.positions, freq, rows.req, rows.first, Paged(keys.cache, keys.block_table, keys.states),
            self.record, plan.ratio, cfg.index_topk, max(rows.longest // plan.ratio, 1),
            candidates if plan.is_candidate_source or plan.restricted else None,
            step.candidates[cfg.candidate_source_layer_id] if plan.restricted else None, rows.most,
        )
        if plan.is_candidate_source:
            step.candidates[plan.index] = blocks
        return chosen
