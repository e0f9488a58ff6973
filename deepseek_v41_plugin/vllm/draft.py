# SPDX-License-Identifier: Apache-2.0
"""The draft model class for the host's DSpark speculator.  (v41-facts 8)"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from ..model.draft import Draft, stage_plans
from ..model.loading import fill_parameters, load_draft
from ..model.prepare import prepare
from ..model.step import BlockRows, LayerPages, Pages, Step
from .caches import LayerCaches
from .hf_config import model_config_of
from .model import checkpoint_directory, settings_of
from .options import Options, draft_eplb_config


class DraftCore(Draft):
    """The core's draft under the names the host's speculator looks for."""

    embed_tokens: nn.Module  # the target's, put here by the host

    @property
    def confidence_head(self) -> nn.Module:
        return self.mtp[-1].confidence_head


class DSparkV41DraftModel(nn.Module):
    """Weights from the target's checkpoint; the host aliases the target's embedding and output head.

    The host calls `combine_hidden_states` and `precompute_and_store_context_kv` with the target's rows
    after each of its forwards, then `forward` on a block a request, then the heads row by row.
    """

    # The checkpoint has neither for the draft, and draft ids are target ids.
    has_own_embed_tokens = has_own_lm_head = False
    draft_id_to_target_id = None
    lm_head: nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.vllm_config = vllm_config
        self.cfg = model_config_of(vllm_config.model_config.hf_config)
        # The host's config for the draft has the target's number of redundant experts, or none.
        target = vllm_config.speculative_config.target_parallel_config
        own = draft_eplb_config(target, Options.parse(vllm_config.additional_config))
        settings = settings_of(vllm_config, own.num_redundant_experts)
        self.block = vllm_config.num_speculative_tokens
        self.model = DraftCore(self.cfg, settings)
        self.plans = stage_plans(self.cfg)
        self.caches = nn.ModuleList(
            LayerCaches(f"model.layers.{plan.index}.attn", self.cfg, settings, plan, vllm_config) for plan in self.plans
        )
        if vllm_config.load_config.load_format == "dummy":
            fill_parameters(self.model)
            prepare(self.model)

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        return [caches.window.prefix for caches in self.caches]

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input_ids, self.model.embed_tokens.weight)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Features of the target's layers side by side [T, n * D] -> main_x [T, D]."""
        return self.model.combine(aux_hidden_states)

    def precompute_and_store_context_kv(
        self, context_states: torch.Tensor, context_positions: torch.Tensor,
        context_slot_mappings: list[torch.Tensor | None] | None = None,
    ) -> None:
        """main_x [T, D] at positions int64 [T] into each stage's window, at slots int64 [T] (-1: nowhere).

        None: the host profiles without caches.
        """
        if context_slot_mappings is None:
            return
        pages = [
            Pages(caches.window.kv_cache, None, slots, caches.window.spec.block_size)
            for caches, slots in zip(self.caches, context_slot_mappings, strict=True)
        ]
        self.model.store_context(context_states, context_positions, pages)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The block pass: hidden states before the norm [T, D]; rows past the real ones are zero."""
        step = self._step(positions)
        count = input_ids.shape[0] if step is None else step.rows.count
        hidden = self.model(input_ids[:count], self.model.embed_tokens, step)
        return nn.functional.pad(hidden, (0, 0, 0, input_ids.shape[0] - count))

    def _step(self, positions: torch.Tensor) -> Step | None:
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return None
        pages = {}
        for plan, caches in zip(self.plans, self.caches, strict=True):
            group = metadata[caches.window.prefix]
            pages[plan.index] = LayerPages(group.pages(caches.window.kv_cache))
        rows = group.rows(positions)
        block = BlockRows(rows.positions, rows.req, rows.first, rows.start, rows.context, most=rows.most, block=self.block)
        return Step(block, pages)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_states, self.lm_head).float()

    compute_draft_logits = compute_logits

    def map_draft_to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids

    def markov_embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.markov_embed(token_ids)

    def markov_bias(self, markov_embed: torch.Tensor) -> torch.Tensor:
        return self.model.markov_shift(markov_embed).float()

    def compute_confidence(self, head_hidden: torch.Tensor, markov_embed: torch.Tensor) -> torch.Tensor:
        """Probabilities that a draft is accepted if those before it were, float32 [n]."""
        return torch.sigmoid(self.model.confidence(head_hidden, markov_embed)).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As the target's: `weights` is not consumed."""
        load_draft(self.model, checkpoint_directory(self.vllm_config))
        prepare(self.model)
        return {name for name, _ in self.named_parameters()}
