# SPDX-License-Identifier: Apache-2.0
"""What the plugin adds to the runner's inputs: Engram's memory, and the replay plan."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.gpu.states import RequestState

from ..model.bounded import Bounds
from ..model.step import requests_of
from ..replay import plan
from .backend import StepPlan
from .options import replay_policy
from .warm_up import warm_up

logger = init_logger("vllm.dsv41")


class Extra(ModelSpecificAttnMetadata):
    """Hands the step's plan to the metadata builders."""

    def __init__(self, plan: StepPlan):
        self.plan = plan

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        return {"plan": self.plan}


class DeepseekV41ModelState(DefaultModelState):
    """Adds Engram's `memory` (see `Model.recall`) to the model's inputs, of each row's token and its predecessors.

    Predecessors inside the step come from the step's own ids (drafts included); older ones from the
    runner's token history, which holds prompt and sampled tokens whoever computed their KV.  So a
    chunk boundary, a prefix hit, a preemption and a hand-over all look alike.

    Bounded replay: the scheduler rewinds a hit by its last window and says from where
    (`NewRequestData.replay_start`); the plan of each step follows (`replay.plan`).

    A CUDA graph reads memory and bounds from tensors that stand where they are and are filled before each replay.
    """

    # The n-grams need token ids, and the forward reads no embeddings.
    supports_prompt_embeds = False

    def __init__(self, vllm_config, model, encoder_cache, device):
        super().__init__(vllm_config, model, encoder_cache, device)
        self.policy = replay_policy(vllm_config, model.cfg)
        self.replay_start = np.zeros(self.max_num_reqs, dtype=np.int64)
        self.whole = np.zeros(self.max_num_reqs, dtype=bool)
        self.standing = Bounds.standing(self.max_num_reqs, device)
        self.bounded = False  # whether the standing bounds change anything
        self.standing_memory: list[torch.Tensor] | None = None
        self.warm = False  # whether kernels of all kinds are compiled
        self.replays = False  # whether the step that is being prepared is a graph's

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        self.replay_start[req_index] = new_req_data.replay_start
        params = new_req_data.sampling_params
        # The second of these came with vLLM 0.33.
        self.whole[req_index] = any(
            getattr(params, name, None) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids")
        )

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        if self.model.ngram_size == 1:
            return inputs
        ngrams = gather_ngrams(
            input_batch.input_ids[: input_batch.num_tokens_after_padding],
            input_batch.positions[: input_batch.num_tokens_after_padding],
            input_batch.num_tokens,
            input_batch.query_start_loc[: input_batch.num_reqs + 1].long(),
            input_batch.idx_mapping[: input_batch.num_reqs],
            req_states.all_token_ids.gpu,
            self.model.ngram_size,
        )
        inputs["memory"] = memory = self.model.model.recall(ngrams)
        if self.replays:
            for standing, found in zip(self.standing_memory, memory, strict=True):
                standing[: found.shape[0]] = found
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Of a graph that is being captured."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        if self.model.ngram_size > 1:
            if self.standing_memory is None:
                rows = max(num_tokens, self.vllm_config.compilation_config.max_cudagraph_capture_size or 0)
                self.standing_memory = self.model.standing_memory(rows)
            inputs["memory"] = [x[:num_tokens] for x in self.standing_memory]
        return inputs

    def capture_inner_cudagraphs(self, input_buffers, block_tables, attn_groups, kv_cache_config: KVCacheConfig) -> None:
        """Called once the host has captured its graphs, the first time to see how much memory they take."""
        super().capture_inner_cudagraphs(input_buffers, block_tables, attn_groups, kv_cache_config)
        if self.warm:
            return
        self.warm, begin = True, time.perf_counter()
        ran = warm_up(self, input_buffers, block_tables, attn_groups, kv_cache_config)
        logger.info("DeepSeek-V4.1 ran %d steps to have its kernels compiled, in %.1f s", ran, time.perf_counter() - begin)

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode, block_tables, slot_mappings: torch.Tensor, attn_groups,
        kv_cache_config: KVCacheConfig, for_capture: bool = False, **kwargs,
    ) -> dict[str, Any]:
        step = StepPlan(trimmed_requests(input_batch))
        if input_batch.has_prefill:
            step.bounds = self._bounds(input_batch)
        self.replays = cudagraph_mode == CUDAGraphMode.FULL
        if self.replays and (step.bounds != Bounds() or self.bounded):
            self.standing.put(step.bounds)
            self.bounded = step.bounds != Bounds()
        metadata = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config,
            for_capture=for_capture, model_specific_attn_metadata=Extra(step), **kwargs,
        )
        if for_capture:
            for group in metadata.values():
                group.plan.bounds = self.standing
        return metadata

    def _bounds(self, batch: InputBatch) -> Bounds:
        requests = slice(batch.num_reqs)
        states = batch.idx_mapping_np[requests]
        return Bounds.of(plan(
            self.policy, first_position=batch.num_computed_tokens_np[requests], rows=batch.num_scheduled_tokens[requests],
            prefill=batch.prefill_len_np[requests], replay_start=self.replay_start[states], whole=self.whole[states],
        ), self.device)


def trimmed_requests(batch: InputBatch) -> int:
    """How many leading requests have drafts of which the device keeps fewer than were scheduled."""
    drafts = batch.num_draft_tokens_per_req
    if drafts is None or not 0 < batch.num_draft_tokens < drafts.sum():
        return 0
    return int(np.count_nonzero(drafts))


def gather_ngrams(
    input_ids: torch.Tensor, positions: torch.Tensor, count: int, first: torch.Tensor,
    states: torch.Tensor, history: torch.Tensor, n: int,
) -> torch.Tensor:
    """ids [T, n], newest first, -1 before the sequence's start and on padding rows.

    input_ids, positions [T], of which `count` rows are real; first int64 [R+1] row offsets; states int
    [R]: each request's row in history [S, L].
    """
    out = torch.full((input_ids.shape[0], n), -1, dtype=torch.int64, device=input_ids.device)
    req = requests_of(first, count)
    row = torch.arange(count, device=input_ids.device)
    begin, state = first[req], states.long()[req]
    at = positions[:count].long()
    for back in range(n):
        inside = row - back >= begin
        here = input_ids[(row - back).clamp(min=0)].long()
        older = history[state, (at - back).clamp(min=0)].long()
        out[:count, back] = torch.where(at >= back, torch.where(inside, here, older), -1)
    return out
