# SPDX-License-Identifier: Apache-2.0
"""Per-request state beyond the caches: the token history that Engram's n-grams look back into."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from ..model.step import requests_of


class DeepseekV41ModelState(DefaultModelState):
    """Adds `ngrams` int [T, n] to the model's inputs: each row's token and its predecessors.

    Predecessors inside the step come from the step's own ids (drafts included); older ones from the
    runner's token history, which holds prompt and sampled tokens whoever computed their KV.  So a
    chunk boundary, a prefix hit, a preemption and a hand-over all look alike.
    """

    # The n-grams need token ids, and the forward reads no embeddings.
    supports_prompt_embeds = False

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        inputs["ngrams"] = gather_ngrams(
            input_batch.input_ids[: input_batch.num_tokens_after_padding],
            input_batch.positions[: input_batch.num_tokens_after_padding],
            input_batch.query_start_loc_np[: input_batch.num_reqs + 1].tolist(),
            input_batch.idx_mapping[: input_batch.num_reqs],
            req_states.all_token_ids.gpu,
            self.model.ngram_size,
        )
        return inputs


def gather_ngrams(
    input_ids: torch.Tensor, positions: torch.Tensor, start: list[int],
    states: torch.Tensor, history: torch.Tensor, n: int,
) -> torch.Tensor:
    """ids [T, n], newest first, -1 before the sequence's start and on padding rows.

    input_ids, positions [T]; start: R+1 row offsets; states int [R]: each request's row in
    history [S, L].
    """
    out = torch.full((input_ids.shape[0], n), -1, dtype=torch.int64, device=input_ids.device)
    count = start[-1]
    req = requests_of(start, input_ids.device)
    row = torch.arange(count, device=input_ids.device)
    first = torch.tensor(start, device=input_ids.device)[req]
    state = states.long()[req]
    at = positions[:count].long()
    for back in range(n):
        inside = row - back >= first
        here = input_ids[(row - back).clamp(min=0)].long()
        older = history[state, (at - back).clamp(min=0)].long()
        out[:count, back] = torch.where(at >= back, torch.where(inside, here, older), -1)
    return out
