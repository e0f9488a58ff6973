# SPDX-License-Identifier: Apache-2.0
"""The model's caches as the host sees them: one layer object per cache, with its spec."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from ..config import LayerPlan, ModelConfig
from ..kernels.formats.records import cache_format
from ..model.settings import Settings
from .backend import DeepseekV41Backend

# Pages start at multiples of this many bytes, so that a page's rows can be read by wide loads.
PAGE_ALIGNMENT = 64


class Cache(nn.Module, AttentionLayerBase):
    """A paged cache owned by the host; `pages` is bound to [blocks, states, width]."""

    def __init__(self, prefix: str, spec: KVCacheSpec):
        super().__init__()
        self.prefix, self.spec = prefix, spec
        self.kv_cache = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Duplicate layer name: {prefix}")
        layers[prefix] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)  # [blocks, 1 head, states, width]

    def get_attn_backend(self) -> type[DeepseekV41Backend]:
        return DeepseekV41Backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.spec

    def forward(self) -> None: ...


class LayerCaches(nn.Module):
    """Window, compressed, index and ring cache of one layer, by the plan."""

    def __init__(self, prefix: str, cfg: ModelConfig, settings: Settings, plan: LayerPlan, vllm_config: VllmConfig):
        super().__init__()
        block = vllm_config.cache_config.block_size
        common = dict(num_kv_heads=1, max_tp_shards=1, dtype=torch.uint8, alignment=PAGE_ALIGNMENT)
        records = cache_format(settings.cache, cfg.head_dim, cfg.qk_rope_head_dim, cfg.index_head_dim)
        self.window = Cache(f"{prefix}.window", SlidingWindowMLASpec(
            block_size=block, head_size=records.window.width,
            sliding_window=cfg.sliding_window, bounded_replay=vllm_config.cache_config.swa_bounded_replay, **common,
        ))
        self.compressed = self.index = self.ring = None
        if not plan.is_kv_source:
            return
        for name, record in (("compressed", records.compressed), ("index", records.index)):
            setattr(self, name, Cache(f"{prefix}.{name}", MLAAttentionSpec(
                block_size=block, head_size=record.width, tokens_per_state=plan.ratio, **common,
            )))
        if plan.ratio == 2:
            # The rows of one step (drafts included) and the waiting one before them.
            states = max(8, 1 << (vllm_config.num_speculative_tokens + 1).bit_length())
            self.ring = Cache(f"{prefix}.ring", CircularBufferSpec(
                block_size=states, num_kv_heads=1, head_size=2 * cfg.head_dim, head_size_v=0,
                dtype=settings.accumulator, block_stride_alignment=PAGE_ALIGNMENT,
            ))
