# SPDX-License-Identifier: Apache-2.0
"""One layer: Engram at its entry, then attention and MoE on the multi-copy stream."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ..config import LayerPlan, ModelConfig
from ..kernels import mhc
from .attention import Attention
from .engram import Engram
from .mhc import Mixer
from .moe import MoE
from .parameters import RMSNorm
from .settings import Settings
from .step import Step


class Block(nn.Module):
    """The mix that collapses the copies into a sublayer comes from the sublayer before it.  (v41-facts 3)"""

    def __init__(self, cfg: ModelConfig, settings: Settings, plan: LayerPlan):
        super().__init__()
        self.plan = plan
        if plan.engram is not None:
            self.engram = Engram(cfg, settings)
        self.hc_attn, self.hc_ffn = Mixer(cfg), Mixer(cfg)
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, settings)
        self.ffn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, settings)
        self.attn, self.ffn = Attention(cfg, settings, plan), MoE(cfg, settings)

    def forward(
        self, stream: torch.Tensor, pre: torch.Tensor, step: Step | None, memory: list[np.ndarray] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """stream [T, c, D], pre [T, c] of the sublayer before -> both for the next layer.

        memory: table rows per Engram layer (None in the profiling run).
        """
        if self.plan.engram is not None and memory is not None:
            stream = self.engram(stream, memory[self.plan.engram])
        next_pre, post, comb = self.hc_attn(stream)
        stream = mhc.expand(stream, self.attn(self.attn_norm(mhc.collapse(stream, pre)), step), post, comb)
        pre = next_pre
        next_pre, post, comb = self.hc_ffn(stream)
        stream = mhc.expand(stream, self.ffn(self.ffn_norm(mhc.collapse(stream, pre))), post, comb)
        return stream, next_pre
