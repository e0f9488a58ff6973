# SPDX-License-Identifier: Apache-2.0
"""The attention backend: what the host must know, and each step's metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheLayout, KVCacheSpec

from ..model.bounded import Bounds
from ..model.step import Pages, Rows, requests_of
from .graphs import why_no_graphs


@dataclass
class StepPlan:
    """What the model state knows of a step and the host's metadata does not say.

    ragged: leading requests whose drafts the device trims (see `Rows`); longest: 0, or the longest sequence
    that a CUDA graph is captured for.
    """

    ragged: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    longest: int = 0


@dataclass
class DeepseekV41Metadata:
    """One cache group's step: the host's tensors as they are, which a CUDA graph finds filled anew at each replay.

    positions int64 [T], None where the host captures the draft's graph without saying them; query_start_loc int32 [R+1]
    on the device; start, context, most: see `Rows`.
    """

    count: int
    positions: torch.Tensor | None
    query_start_loc: torch.Tensor
    start: list[int]
    context: list[int]
    most: int
    block_table: torch.Tensor
    slots: torch.Tensor | None
    block_size: int
    plan: StepPlan

    def rows(self, positions: torch.Tensor) -> Rows:
        """Derived by the forward itself, from its own positions int64 [T or more], so that a graph holds it; the same for
        all groups of a step."""
        positions, first = (positions if self.positions is None else self.positions)[: self.count], self.query_start_loc.long()
        if self.plan.longest:
            return Rows.padded(positions, first, self.plan.longest, self.most)
        return Rows(positions, requests_of(first, self.count), first, self.start, self.context, self.plan.ragged, self.most)

    def pages(self, cache: torch.Tensor) -> Pages:
        return Pages(cache, self.block_table, self.slots, self.block_size)


class DeepseekV41MetadataBuilder(AttentionMetadataBuilder[DeepseekV41Metadata]):
    """Query lengths, positions, block table and slots; nothing is planned per kernel."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Decode steps of any lengths, where every op that is chosen can run in a graph."""
        return AttentionCGSupport.NEVER if why_no_graphs(vllm_config) else AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> int | None:
        """Asked for scheduled verification, whose requests have 1 to k + 1 rows each."""
        return None if why_no_graphs(vllm_config) else 1 + vllm_config.num_speculative_tokens

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> DeepseekV41Metadata:
        """For the longest sequence, over the host's standing tensors; the draft's capture comes here too."""
        return self.build(0, common_attn_metadata, plan=StepPlan(longest=common_attn_metadata.max_seq_len))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False,
        plan: StepPlan | None = None,
    ) -> DeepseekV41Metadata:
        common, count = common_attn_metadata, common_attn_metadata.num_actual_tokens
        ring = isinstance(self.kv_cache_spec, CircularBufferSpec)
        lengths = common.seq_lens_cpu_upper_bound
        return DeepseekV41Metadata(
            count, None if common.positions is None else common.positions[:count], common.query_start_loc,
            common.query_start_loc_cpu.tolist(), [] if lengths is None else lengths.tolist(), common.max_query_len,
            common.block_table_tensor, None if ring else common.slot_mapping[:count], self.kv_cache_spec.block_size, plan or StepPlan(),
        )


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
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
