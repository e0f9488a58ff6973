# SPDX-License-Identifier: Apache-2.0
"""The text model: token ids in, final hidden states and logits out."""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..kernels import mhc
from .block import Block
from .engram import NgramHash
from .parameters import RMSNorm, raw
from .settings import Settings
from .step import Step


class Table(nn.Module):
    """`weight` bf16 [rows, D]: the embedding or the output head, whole on every rank."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.weight = raw((rows, dim), torch.bfloat16)


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

    def forward(self, input_ids: torch.Tensor, step: Step | None, ngrams: torch.Tensor | None) -> torch.Tensor:
        """input_ids int [T], ngrams int [T, n] (see `NgramHash`) -> normed hidden states [T, D].

        step None (the host's profiling run) leaves out attention and Engram.
        """
        embedded = nn.functional.embedding(input_ids, self.embed.weight).to(self.settings.dtype)
        stream = embedded[:, None].repeat(1, self.cfg.hc_mult, 1)
        pre = torch.zeros(stream.shape[:2], dtype=self.settings.accumulator, device=stream.device)
        pre[:, 0] = 1
        memory = None
        if self.ngram_hash is not None and step is not None:
            memory = self.ngram_hash(ngrams)
        for layer in self.layers:
            stream, pre = layer(stream, pre, step, memory)
        return self.norm(mhc.collapse(stream, pre))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, D] -> logits [n, V] in float32 (float64 in exact mode)."""
        acc = self.settings.accumulator
        return nn.functional.linear(hidden.to(acc), self.head.weight.to(acc))
