# SPDX-License-Identifier: Apache-2.0
"""One layer: Engram at its entry, then attention and MoE on the multi-copy stream."""

from __future__ import annotations

from torch import nn

from ..config import LayerPlan, ModelConfig
from .attention import Attention
from .engram import Engram
from .mhc import Mixer, Residual
from .moe import MoE
from .parameters import RMSNorm
from .settings import Settings
from .step import Decoder, Step


class Block(nn.Module):
    """The mix that collapses the copies into a sublayer comes from the sublayer before it.  (v41-facts 3)

    experts, top_k: of the MoE; the backbone's unless given.
    """

    def __init__(
        self, cfg: ModelConfig, settings: Settings, plan: LayerPlan, experts: int | None = None, top_k: int | None = None,
    ):
        super().__init__()
        self.plan = plan
        if plan.engram is not None:
            self.engram = Engram(cfg, settings)
        self.hc_attn, self.hc_ffn = Mixer(cfg), Mixer(cfg)
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, settings)
        self.ffn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, settings)
        self.attn = Attention(cfg, settings, plan)
        self.ffn = MoE(cfg, settings, experts or cfg.n_routed_experts, top_k or cfg.num_experts_per_tok)

    def prepare(self) -> None:
        """What enters a sublayer goes into FP8 Linears."""
        self.attn_norm.rows8 = self.ffn_norm.rows8 = True

    def forward(self, residual: Residual, step: Step | None) -> Residual:
        """Of T rows, from the layer before and for the next."""
        h, residual = residual.enter(self.hc_attn, self.attn_norm)
        qr, kv = self.attn.project(h)
        if step is not None:
            self.attn.store(h, kv, step)
        return self._rest(residual, self.attn.attend(h, qr, step))

    def forward_cut(self, residual: Residual, step: Step, decoder: Decoder) -> Residual:
        """As `forward` for the last KV source: caches for every row of `step`, the rest for the decoder's."""
        h, residual = residual.enter(self.hc_attn, self.attn_norm)
        self.attn.store(h, self.attn.wkv(h), step)
        if decoder.kept is not None:
            residual, h = residual.rows(decoder.kept), h.rows(decoder.kept)
        return self._rest(residual, self.attn.attend(h, self.attn.wq_a(h), decoder.step))

    def _rest(self, residual: Residual, y) -> Residual:
        h, residual = residual.left(y).enter(self.hc_ffn, self.ffn_norm)
        return residual.left(self.ffn(h))
