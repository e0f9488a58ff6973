# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of one layer.  (v41-facts 5)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..kernels import moe as ops
from .parameters import Fp8Linear, raw
from .settings import Settings


class Gate(nn.Module):
    """Router: `weight` bf16 [E, D], `bias` for text rows and `bias_vl` for image rows, float32 [E]."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = raw((experts, hidden), torch.bfloat16)
        self.bias = raw((experts,), torch.float32)
        self.bias_vl = raw((experts,), torch.float32)


class SharedExpert(nn.Module):
    """One SwiGLU every row passes, cut over its intermediate dim."""

    def __init__(self, cfg: ModelConfig, settings: Settings):
        super().__init__()
        inner = cfg.moe_intermediate_size * cfg.n_shared_experts
        self.w1 = Fp8Linear(inner, cfg.hidden_size, settings, shard_dim=0)
        self.w3 = Fp8Linear(inner, cfg.hidden_size, settings, shard_dim=0)
        self.w2 = Fp8Linear(cfg.hidden_size, inner, settings, shard_dim=1)
        self.limit, self.accumulator = cfg.swiglu_limit, settings.accumulator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D], this rank's part of the sum."""
        gate, up = self.w1(x).to(self.accumulator), self.w3(x).to(self.accumulator)
        return self.w2(ops.swiglu(gate, up, self.limit).to(x.dtype))


class Experts(nn.Module):
    """This rank's routed experts, stacked and packed: see `kernels.moe.reference.experts`."""

    def __init__(self, experts: int, cfg: ModelConfig, settings: Settings):
        super().__init__()
        self.count = experts // settings.shards.size
        self.first = self.count * settings.shards.rank
        inner, hidden = cfg.moe_intermediate_size, cfg.hidden_size
        self.w13 = raw((self.count, 2 * inner, hidden // 2), torch.uint8)
        self.w13_scale = raw((self.count, 2 * inner, hidden // 32), torch.uint8)
        self.w2 = raw((self.count, hidden, inner // 2), torch.uint8)
        self.w2_scale = raw((self.count, hidden, inner // 32), torch.uint8)


class MoE(nn.Module):
    """Routed experts (cut by expert over the ranks) plus the shared one."""

    def __init__(self, cfg: ModelConfig, settings: Settings):
        super().__init__()
        self.top_k, self.scaling, self.limit = cfg.num_experts_per_tok, cfg.routed_scaling_factor, cfg.swiglu_limit
        self.temperature, self.settings = cfg.gate_temp, settings
        self.gate = Gate(cfg.n_routed_experts, cfg.hidden_size)
        self.experts = Experts(cfg.n_routed_experts, cfg, settings)
        self.shared_experts = SharedExpert(cfg, settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        held = self.experts
        ids, weights = ops.route(x, self.gate.weight, self.gate.bias, self.top_k, self.scaling, self.temperature)
        routed = ops.experts(
            x, ids, weights, held.w13, held.w13_scale, held.w2, held.w2_scale,
            self.limit, held.first, self.settings.activation_quant,
        )
        y = (routed + self.shared_experts(x).to(routed.dtype)).to(x.dtype)
        return self.settings.shards.all_reduce(y)
