# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of one layer.  (v41-facts 5)"""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..eplb.maps import initial
from ..kernels import moe as ops
from ..kernels.linear import RowWeight, row_linear, swiglu_rows
from ..kernels.moe import Replicas
from .parameters import Fp8Linear, Hidden, join, raw
from .settings import Settings
from .uniform import scattered


class Gate(nn.Module):
    """Router: `weight` bf16 [E, D], `bias` for text rows and `bias_vl` for image rows, float32 [E]."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = raw((experts, hidden), torch.bfloat16)
        self.bias = raw((experts,), torch.float32)
        self.bias_vl = raw((experts,), torch.float32)


class SharedExpert(nn.Module):
    """One SwiGLU every row passes, cut over its intermediate dim.  joined: once prepared, w1 and w3 as one Linear."""

    joined: RowWeight | None = None

    def __init__(self, cfg: ModelConfig, settings: Settings):
        super().__init__()
        inner = cfg.moe_intermediate_size * cfg.n_shared_experts
        self.w1 = Fp8Linear(inner, cfg.hidden_size, settings, shard_dim=0)
        self.w3 = Fp8Linear(inner, cfg.hidden_size, settings, shard_dim=0)
        self.w2 = Fp8Linear(cfg.hidden_size, inner, settings, shard_dim=1)
        self.limit, self.accumulator = cfg.swiglu_limit, settings.accumulator

    def prepare(self) -> None:
        """After its Linears."""
        self.joined = join(self.joined, self.w1, self.w3)

    def forward(self, h: Hidden) -> torch.Tensor:
        """[T, D] -> [T, D], this rank's part of the sum."""
        x = h.x
        if self.joined is None or self.w2.row is None:
            gate, up = self.w1(h).to(self.accumulator), self.w3(h).to(self.accumulator)
            return self.w2(ops.swiglu(gate, up, self.limit).to(x.dtype))
        return row_linear(swiglu_rows(h.times(self.joined), self.limit), self.w2.row, x.dtype)


class Experts(nn.Module):
    """This rank's slots `first` to `first + count - 1` of the physical experts, stacked and packed: see
    `kernels.moe.reference.experts`.  `loaded`: the logical expert that each holds at first."""

    def __init__(self, experts: int, cfg: ModelConfig, settings: Settings):
        super().__init__()
        ranks = settings.expert_ranks
        self.count = (experts + ranks.redundant) // ranks.size
        self.first = self.count * ranks.rank
        self.loaded = initial(experts, ranks.redundant)[self.first : self.first + self.count].tolist()
        inner, hidden = cfg.moe_intermediate_size, cfg.hidden_size
        self.w13 = raw((self.count, 2 * inner, hidden // 2), torch.uint8)
        self.w13_scale = raw((self.count, 2 * inner, hidden // 32), torch.uint8)
        self.w2 = raw((self.count, hidden, inner // 2), torch.uint8)
        self.w2_scale = raw((self.count, hidden, inner // 32), torch.uint8)


def count_rows(layer: MoE, rows: torch.Tensor) -> None:
    """Padding begins behind `rows`, an int []: from there on rows are no load.  The layers of a model share the tensor."""
    if layer.replicas is not None:
        layer.replicas.rows.copy_(rows)


class MoE(nn.Module):
    """`experts` routed experts (cut by expert over the ranks), `top_k` a row, plus the shared one.

    replicas: where each expert is, and what counts its rows; None: slots are experts.  narrow: once prepared,
    what `kernels.moe.spread_ok` said of the scales of all experts that may come to lie here.
    """

    replicas: Replicas | None = None
    narrow = False

    def __init__(self, cfg: ModelConfig, settings: Settings, experts: int, top_k: int):
        super().__init__()
        self.top_k, self.scaling, self.limit = top_k, cfg.routed_scaling_factor, cfg.swiglu_limit
        self.temperature, self.settings = cfg.gate_temp, settings
        self.gate = Gate(experts, cfg.hidden_size)
        self.experts = Experts(experts, cfg, settings)
        self.shared_experts = SharedExpert(cfg, settings)

    def prepare(self) -> None:
        """Experts may move, so all ranks say the same."""
        held = self.experts
        wide = torch.tensor([float(not all(map(ops.spread_ok, (held.w13_scale, held.w2_scale))))], device=held.w2.device)
        self.narrow = not self.settings.expert_ranks.all_reduce(wide).item()

    def forward(self, h: Hidden) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        x = h.x
        held, ranks = self.experts, self.settings.expert_ranks
        ids, weights = ops.route(
            scattered(x) if self.settings.uniform_routing else x, self.gate.weight, self.gate.bias, self.top_k, self.scaling, self.temperature, self.replicas,
        )
        (rows, ids, weights), own = ranks.gather(x, ids, weights)
        shared, alone = self.shared_experts(h), own == slice(None)
        y = ops.experts(
            rows, ids, weights, held.w13, held.w13_scale, held.w2, held.w2_scale,
            self.limit, held.first, self.settings.activation_quant, h.fp8 if alone else None, self.narrow, shared if alone else None,
        )
        if alone:
            return ranks.all_reduce(y)
        # Apart, so that the order of the sum does not depend on whose rows these are.
        return ranks.all_reduce(y.to(x.dtype))[own] + self.settings.shards.all_reduce(shared)
