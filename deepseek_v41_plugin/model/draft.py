# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft: context KV, the block pass, Markov and confidence heads.  (v41-facts 8)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import LayerPlan, ModelConfig
from ..kernels.linear import wide_linear
from .block import Block
from .entry import Table, enter
from .moe import count_rows
from .parameters import Fp8Linear, Plain, RMSNorm
from .settings import Settings, as_set
from .step import Pages, Step


def stage_plans(cfg: ModelConfig) -> tuple[LayerPlan, ...]:
    """The stages as layers behind the backbone's: windows only."""
    first = cfg.num_hidden_layers
    return tuple(
        LayerPlan(first + stage, 0, None, None, False, False, False, False, None)
        for stage in range(cfg.num_nextn_predict_layers)
    )


class MarkovHead(nn.Module):
    """`embed` and `head`, bf16 [V, rank]: how a token shifts the logits of the one after it."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.embed = Table(cfg.vocab_size, cfg.dspark_markov_rank)
        self.head = Plain(cfg.vocab_size, cfg.dspark_markov_rank)


class ConfidenceHead(nn.Module):
    """`proj` bf16 [1, D + rank], used in the accumulator's dtype."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.proj = Plain(1, cfg.hidden_size + cfg.dspark_markov_rank)


class Draft(nn.Module):
    """Parameter names as in the checkpoint, `mtp.S.*`; embedding and output head are the target's."""

    def __init__(self, cfg: ModelConfig, settings: Settings):
        super().__init__()
        self.cfg, self.settings = cfg, settings
        self.mtp = nn.ModuleList(
            Block(cfg, settings, plan, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok)
            for plan in stage_plans(cfg)
        )
        first, last, width = self.mtp[0], self.mtp[-1], cfg.hidden_size
        first.main_proj = Fp8Linear(width, len(cfg.dspark_target_layer_ids) * width, settings)
        first.main_norm = RMSNorm(width, cfg.rms_norm_eps, settings)
        last.norm = RMSNorm(width, cfg.rms_norm_eps, settings)
        last.markov_head, last.confidence_head = MarkovHead(cfg), ConfidenceHead(cfg)

    @as_set
    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the target's layers side by side [T, n * D] -> main_x [T, D]."""
        return self.mtp[0].main_norm(self.mtp[0].main_proj(features))

    @as_set
    def store_context(self, main_x: torch.Tensor, positions: torch.Tensor, pages: list[Pages]) -> None:
        """Write the context KV of target rows main_x [T, D] at int64 [T], one cache a stage."""
        for stage, cache in zip(self.mtp, pages, strict=True):
            stage.attn.store_window(stage.attn.wkv(main_x), positions, cache)

    @as_set
    def forward(self, input_ids: torch.Tensor, embed: Table, step: Step | None) -> torch.Tensor:
        """The block pass: input_ids int [T], of each request its new token and then noise; step.rows
        `BlockRows` -> hidden states before the norm [T, D] in the accumulator's dtype."""
        residual = enter(input_ids, embed, self.cfg.hc_mult, self.settings)
        self.settings.expert_ranks.begin(input_ids.shape[0])
        if step is not None:
            count_rows(self.mtp[0].ffn, step.rows.first[-1])
        for stage in self.mtp:
            residual = stage(residual, step)
        return residual.hidden()

    @as_set
    def logits(self, hidden: torch.Tensor, head: Table) -> torch.Tensor:
        """hidden [n, D] of `forward` -> logits [n, V] before the Markov shift, in the accumulator's dtype."""
        return wide_linear(self.mtp[-1].norm(hidden), head.weight)

    def markov_embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens int [n] -> [n, rank] in the activations' dtype, which holds them exactly."""
        table = self.mtp[-1].markov_head.embed.weight
        return nn.functional.embedding(tokens, table).to(self.settings.dtype)

    @as_set
    def markov_shift(self, embedded: torch.Tensor) -> torch.Tensor:
        """What the token before, embedded [n, rank], adds to the logits: [n, V] in the accumulator's dtype."""
        return wide_linear(embedded, self.mtp[-1].markov_head.head.weight)

    @as_set
    def confidence(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Logits c_i of P(draft i accepted | those before it were): hidden [n, D], embedded [n, rank] -> [n]."""
        both = torch.cat((hidden, embedded.to(hidden.dtype)), -1)
        return self.mtp[-1].confidence_head.proj(both)[:, 0]
