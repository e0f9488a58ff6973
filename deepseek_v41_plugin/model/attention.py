# SPDX-License-Identifier: Apache-2.0
"""Window + compressed attention with sinks, inverse RoPE and a grouped output.  (v41-facts 4)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import LayerPlan, ModelConfig
from ..kernels.attention import attend
from ..kernels.formats.records import cache_format
from ..kernels.latent import write_record
from ..kernels.linear import RowWeight
from ..kernels.paging import Paged
from .compressor import Compressor
from .indexer import Indexer
from .parameters import Fp8Linear, GroupLinear, Hidden, RMSNorm, join, raw
from .rope import frequencies
from .settings import Settings
from .step import LayerPages, Pages, Step


class Attention(nn.Module):
    """One layer's attention; heads and output groups are cut over the tensor parallel ranks.

    joined: once prepared, wq_a and wkv as one Linear.
    """

    joined: RowWeight | None = None

    def __init__(self, cfg: ModelConfig, settings: Settings, plan: LayerPlan):
        super().__init__()
        self.cfg, self.plan, self.settings = cfg, plan, settings
        shards = settings.shards
        self.heads = cfg.num_attention_heads // shards.size
        self.groups = cfg.o_groups // shards.size
        self.register_buffer("freq", frequencies(cfg, compressed=plan.ratio > 0), persistent=False)
        eps = cfg.rms_norm_eps
        self.wq_a = Fp8Linear(cfg.q_lora_rank, cfg.hidden_size, settings)
        self.q_norm = RMSNorm(cfg.q_lora_rank, eps, settings)
        self.wq_b = Fp8Linear(cfg.num_attention_heads * cfg.head_dim, cfg.q_lora_rank, settings, shard_dim=0)
        self.wkv = Fp8Linear(cfg.head_dim, cfg.hidden_size, settings)
        self.kv_norm = RMSNorm(cfg.head_dim, eps, settings)
        per_group = cfg.num_attention_heads // cfg.o_groups * cfg.head_dim
        self.wo_a = GroupLinear(cfg.o_groups * cfg.o_lora_rank, per_group, settings, shard_dim=0)
        self.wo_b = Fp8Linear(cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank, settings, shard_dim=1)
        self.attn_sink = raw((self.heads,), torch.float32, shard_dim=0)
        if plan.is_kv_source:
            self.compressor = Compressor(cfg, settings, plan.ratio)
        self.format = cache_format(settings.cache, cfg.head_dim, cfg.qk_rope_head_dim, cfg.index_head_dim)
        if plan.is_index_source:
            self.indexer = Indexer(cfg, settings, plan, self.format.index)

    def prepare(self) -> None:
        """After its Linears."""
        self.joined = join(self.joined, self.wq_a, self.wkv)
        self.q_norm.rows8 = True

    def project(self, h: Hidden) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, D] -> (the query's low rank [T, q_lora], the window's latent [T, head_dim]), before their norms."""
        if self.joined is None:
            return self.wq_a(h), self.wkv(h)
        return h.times(self.joined).split((self.cfg.q_lora_rank, self.cfg.head_dim), -1)

    def store(self, h: Hidden, kv: torch.Tensor, step: Step) -> None:
        """Write what rows h [T, D], kv [T, head_dim] leave in this layer's own caches."""
        pages = step.pages[self.plan.index]
        self.store_window(kv, step.rows.positions, pages.window)
        if self.plan.is_kv_source:
            self._compress(h.x, step, pages)

    def store_window(self, kv: torch.Tensor, positions: torch.Tensor, pages: Pages) -> None:
        """Write the window latents kv [T, head_dim], before their norm, at positions int64 [T]."""
        write_record(
            kv, self.kv_norm.weight, self.kv_norm.eps, positions, self.freq, pages.slots, pages.cache, self.format.window,
            block_size=pages.block_size,
        )

    def attend(self, h: Hidden, qr: torch.Tensor, step: Step | None) -> torch.Tensor:
        """h [T, D], qr [T, q_lora] -> [T, D], over caches already written.  Without a step (the host's profiling
        run) attention itself is skipped."""
        normed = self.q_norm.hidden(qr)
        q = self.wq_b(normed).unflatten(-1, (self.heads, self.cfg.head_dim))
        if step is None:
            return self._output(torch.zeros_like(q))
        rows, pages = step.rows, step.pages[self.plan.index]
        compressed = chosen = None
        if self.plan.ratio:
            source = step.pages[self.plan.kv_source]
            if self.plan.is_index_source:
                step.selected[self.plan.index] = self.indexer.select(h.x, normed, self.freq, step, source.index)
            chosen = step.selected[self.plan.index_source]
            compressed = Paged(source.compressed.cache, source.compressed.block_table, source.compressed.states)
        low, high, count = step.window(pages.window, self.cfg.sliding_window)
        window = Paged(pages.window.cache, pages.window.block_table, pages.window.block_size)
        return self._output(attend(
            q, rows.positions, self.freq, self.attn_sink, self.cfg.head_dim**-0.5,
            window, low, high, count, self.format.window, compressed, chosen, self.format.compressed, rows.req,
        ))

    def _compress(self, x: torch.Tensor, step: Step, pages: LayerPages) -> None:
        positions, norm, k_norm = step.rows.positions, self.compressor.norm, self.indexer.k_norm

        def write(values: torch.Tensor, norm: RMSNorm, into: Pages, record) -> torch.Tensor:
            return write_record(
                values, norm.weight, norm.eps, positions, self.freq, into.slots, into.cache, record, self.plan.ratio, into.block_size,
            )

        latent = write(self.compressor(x, step.rows, pages.ring), norm, pages.compressed, self.format.compressed)
        write(self.indexer.wk(latent), k_norm, pages.index, self.format.index)

    def _output(self, o: torch.Tensor) -> torch.Tensor:
        """Heads [T, H, d] -> each group's low-rank part -> [T, D]; wo_a is computed in the activations' dtype."""
        low = self.wo_a(o.unflatten(1, (self.groups, -1)).flatten(2)).flatten(1)
        return self.settings.shards.all_reduce(self.wo_b(low))
