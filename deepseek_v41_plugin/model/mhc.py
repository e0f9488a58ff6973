# SPDX-License-Identifier: Apache-2.0
"""The mHC parameters of one sublayer."""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..kernels import mhc
from .parameters import raw


class Mixer(nn.Module):
    """Predicts the mixes of a sublayer; named in the checkpoint hc_{attn,ffn}_{fn,base,scale}."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        copies = cfg.hc_mult
        rows = copies * (2 + copies)
        self.fn = raw((rows, copies * cfg.hidden_size), torch.float32)
        self.base = raw((rows,), torch.float32)
        self.scale = raw((3,), torch.float32)
        self.iterations, self.mix_eps, self.norm_eps = cfg.hc_sinkhorn_iters, cfg.hc_eps, cfg.rms_norm_eps

    def forward(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """stream [T, c, D] -> (pre of the next sublayer [T, c], post [T, c], comb [T, c, c])."""
        return mhc.mixes(stream, self.fn, self.base, self.scale, self.iterations, self.mix_eps, self.norm_eps)
