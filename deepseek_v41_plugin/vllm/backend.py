# SPDX-License-Identifier: Apache-2.0
"""The attention backend: what the host must know, and each step's metadata."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheLayout

from ..model.step import Pages, Rows, requests_of


@dataclass
class DeepseekV41Metadata:
    """One cache group's step: the rows of the batch and where they lie in the group's pages."""

    rows: Rows
    block_table: torch.Tensor
    slots: torch.Tensor | None
    block_size: int

    def pages(self, cache: torch.Tensor) -> Pages:
        return Pages(cache, self.block_table, self.slots, self.block_size)


class DeepseekV41MetadataBuilder(AttentionMetadataBuilder[DeepseekV41Metadata]):
    """Query lengths, positions, block table and slots; nothing is planned per kernel."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False,
    ) -> DeepseekV41Metadata:
        common = common_attn_metadata
        count = common.num_actual_tokens
        start = common.query_start_loc_cpu.tolist()
        requests = requests_of(start, self.device)
        rows = Rows(common.positions[:count].long(), requests, start, common.seq_lens_cpu_upper_bound.tolist())
        ring = isinstance(self.kv_cache_spec, CircularBufferSpec)
        slots = None if ring else common.slot_mapping[:count]
        return DeepseekV41Metadata(rows, common.block_table_tensor, slots, self.kv_cache_spec.block_size)


class DeepseekV41Backend(AttentionBackend):
    """Registered as CUSTOM; the model's layers name it themselves, whatever --attention-backend says."""

    supported_dtypes = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "fp8_ds_mla"]

    @staticmethod
    def get_name() -> str:
        return "DEEPSEEK_V41"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError("DeepSeek-V4.1's layers run their attention themselves")

    @staticmethod
    def get_builder_cls() -> type[DeepseekV41MetadataBuilder]:
        return DeepseekV41MetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
