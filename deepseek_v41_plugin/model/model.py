# SPDX-License-Identifier: Apache-2.0
"""The text model: token ids in, final hidden states and logits out."""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..kernels.invariant import over_rows
from ..kernels.linear import wide_linear
from .block import Block
from .engram import NgramHash
from .entry import Table, enter
from .mhc import Residual
from .moe import count_rows
from .parameters import RMSNorm
from .settings import Settings, as_set
from .step import Step


class Model(nn.Module):
    """DeepSeek-V4.1-Flash, text only; parameter names as in the checkpoint (see `loading.py`)."""

    ngram_hash: NgramHash | None = None

    def __init__(self, cfg: ModelConfig, settings: Settings):
        super().__init__()
        self.cfg, self.settings = cfg, settings
        self.embed = Table(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, settings, plan) for plan in cfg.layers)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, settings)
        self.head = Table(cfg.vocab_size, cfg.hidden_size)

    @as_set
    def forward(
        self, input_ids: torch.Tensor, step: Step | None, memory: list[torch.Tensor] | None, features: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """input_ids int [T], memory of `recall` -> normed hidden states [T, D], and the stream at the entry
        of each layer in `features`, its copies averaged [T, D].  (v41-facts 8.1)

        step None (the host's profiling run) leaves out attention and Engram.  Rows that a decoder in
        `step` drops are zero from the last KV source on.
        """
        residual = enter(input_ids, self.embed, self.cfg.hc_mult, self.settings)
        count, seen, kept, ranks = input_ids.shape[0], [], None, self.settings.expert_ranks
        ranks.begin(count)
        if step is not None:
            count_rows(self.layers[0].ffn, step.rows.first[-1])
        for layer in self.layers:
            plan = layer.plan
            if memory is not None and step is not None and plan.engram is not None:
                found, residual = memory[plan.engram], residual.closed()
                stream = layer.engram(residual.stream, found if kept is None else found[kept])
                residual = Residual(stream, residual.pre)
            if plan.index in features:
                residual = residual.closed()
                seen.append(_restored(over_rows(_mean_of_copies, residual.stream), kept, count))
            cut = plan.index == self.cfg.last_kv_source
            if cut:  # on any rank, so all say how many rows are left
                ranks.begin(count if step is None or step.decoder is None else step.decoder.step.rows.count)
            if cut and step is not None and step.decoder is not None:
                decoder, kept = step.decoder, step.decoder.kept
                residual = layer.forward_cut(residual, step, decoder)
                step = decoder.step
            else:
                residual = layer(residual, step)
        return _restored(residual.last(self.norm), kept, count), seen

    def recall(self, ngrams: torch.Tensor) -> list[torch.Tensor] | None:
        """What the Engram tables hold for ngrams int [T, n] (see `NgramHash`): values [T, C * dim] for each
        Engram layer, or None where there is none.  Reads the ids back: a step does this before its graph."""
        if self.ngram_hash is None:
            return None
        layers = [layer.engram for layer in self.layers if layer.plan.engram is not None]
        return [
            layer.table.lookup(rows, self.settings.dtype, ngrams.device)
            for layer, rows in zip(layers, self.ngram_hash(ngrams), strict=True)
        ]

    @as_set
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, D] -> logits [n, V] in float32 (float64 in exact mode)."""
        return wide_linear(hidden, self.head.weight)


def _mean_of_copies(stream: torch.Tensor) -> torch.Tensor:
    return stream.mean(1)


def _restored(x: torch.Tensor, kept: torch.Tensor | None, count: int) -> torch.Tensor:
    """Rows x [K, D] at their places `kept` int64 [K] among `count`, zeros elsewhere."""
    if kept is None:
        return x
    return x.new_zeros(count, x.shape[1]).index_copy_(0, kept, x)
