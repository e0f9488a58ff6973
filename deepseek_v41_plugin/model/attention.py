# SPDX-License-Identifier: Apache-2.0
"""Window + compressed attention with sinks, inverse RoPE and a grouped output.  (v41-facts 4)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import LayerPlan, ModelConfig
from ..kernels.attention import sparse_attention
from ..kernels.formats.blocks import dense_weight
from ..kernels.formats.records import cache_format
from ..kernels.paging import slots_of, write_rows
from .compressor import Compressor
from .indexer import Indexer
from .parameters import Fp8Linear, RMSNorm, raw
from .rope import Rope, frequencies
from .settings import Settings
from .step import LayerPages, Step


class Attention(nn.Module):
    """One layer's attention; heads and output groups are cut over the tensor parallel ranks."""

    def __init__(self, cfg: ModelConfig, settings: Settings, plan: LayerPlan):
        super().__init__()
        self.cfg, self.plan, self.settings = cfg, plan, settings
        shards = settings.shards
        self.heads = cfg.num_attention_heads // shards.size
        self.groups = cfg.o_groups // shards.size
        self.rope = Rope(frequencies(cfg, compressed=plan.ratio > 0))
        eps = cfg.rms_norm_eps
        self.wq_a = Fp8Linear(cfg.q_lora_rank, cfg.hidden_size, settings)
        self.q_norm = RMSNorm(cfg.q_lora_rank, eps, settings)
        self.wq_b = Fp8Linear(cfg.num_attention_heads * cfg.head_dim, cfg.q_lora_rank, settings, shard_dim=0)
        self.wkv = Fp8Linear(cfg.head_dim, cfg.hidden_size, settings)
        self.kv_norm = RMSNorm(cfg.head_dim, eps, settings)
        per_group = cfg.num_attention_heads // cfg.o_groups * cfg.head_dim
        self.wo_a = Fp8Linear(cfg.o_groups * cfg.o_lora_rank, per_group, settings, shard_dim=0)
        self.wo_b = Fp8Linear(cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank, settings, shard_dim=1)
        self.attn_sink = raw((self.heads,), torch.float32, shard_dim=0)
        if plan.is_kv_source:
            self.compressor = Compressor(cfg, settings, plan.ratio)
        self.format = cache_format(settings.cache, cfg.head_dim, cfg.qk_rope_head_dim, cfg.index_head_dim)
        if plan.is_index_source:
            self.indexer = Indexer(cfg, settings, plan, self.rope, self.format.index)

    def forward(self, x: torch.Tensor, step: Step | None) -> torch.Tensor:
        """x [T, D] -> [T, D].  Without a step (the host's profiling run) attention itself is skipped."""
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).unflatten(-1, (self.heads, self.cfg.head_dim))
        kv = self.kv_norm(self.wkv(x))
        if step is None:
            return self._output(q)
        positions, pages = step.rows.positions, step.pages[self.plan.index]
        q, kv = self.rope(q, positions), self.rope(kv, positions)
        write_rows(pages.window.cache, pages.window.slots, self.format.window.encode(kv))
        if self.plan.is_kv_source:
            self._compress(x, step, pages)
        if self.plan.is_index_source:
            keys = step.pages[self.plan.kv_source].index
            step.selected[self.plan.index] = self.indexer.select(x, qr, step, keys)
        compressed, slots = None, None
        if self.plan.ratio:
            chosen = step.selected[self.plan.index_source]
            source = step.pages[self.plan.kv_source].compressed
            compressed = source.cache
            slots = slots_of(source.block_table, step.rows.req, chosen, source.states)
        o = sparse_attention(
            q, self.attn_sink, self.cfg.head_dim**-0.5,
            pages.window.cache, self._window_slots(step, pages), self.format.window,
            compressed, slots, self.format.compressed,
        )
        return self._output(self.rope(o, positions, inverse=True))

    def _window_slots(self, step: Step, pages: LayerPages) -> torch.Tensor:
        """Slots of positions pos-W+1 .. pos, -1 before the sequence's start: [T, W]."""
        back = torch.arange(self.cfg.sliding_window - 1, -1, -1, device=step.rows.positions.device)
        positions = (step.rows.positions[:, None] - back).clamp(min=-1)
        return slots_of(pages.window.block_table, step.rows.req, positions, pages.window.block_size)

    def _compress(self, x: torch.Tensor, step: Step, pages: LayerPages) -> None:
        latent = self.compressor(x, step.rows, pages.ring)
        group = step.rows.positions // self.plan.ratio * self.plan.ratio
        keys = self.indexer.keys(latent, group)
        write_rows(pages.index.cache, self.compressor.slots(step.rows, pages.index), keys)
        record = self.format.compressed.encode(self.rope(latent, group))
        write_rows(pages.compressed.cache, self.compressor.slots(step.rows, pages.compressed), record)

    def _output(self, o: torch.Tensor) -> torch.Tensor:
        """Heads [T, H, d] -> each group's low-rank part -> [T, D]; wo_a is computed in the activations' dtype."""
        grouped = o.unflatten(1, (self.groups, -1)).flatten(2)
        wo_a = dense_weight(self.wo_a.weight, self.wo_a.scale, o.dtype).unflatten(0, (self.groups, -1))
        low = torch.einsum("tgi,gri->tgr", grouped, wo_a).flatten(1)
        return self.settings.shards.all_reduce(self.wo_b(low))
