# SPDX-License-Identifier: Apache-2.0
"""Engram: n-gram hash memory added to the stream at a layer's entry.  (v41-facts 6)"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ..config import ModelConfig
from ..kernels.engram import engram_gate
from .engram_hash import apply_pad, multipliers, ngram_rows
from .engram_table import EngramTable
from .parameters import Fp8Linear, raw
from .settings import Settings


class NgramHash:
    """Token ids to table rows for every Engram layer; `vocab` is the compressed id of each token id."""

    def __init__(self, cfg: ModelConfig, vocab: np.ndarray):
        self.cfg, self.vocab = cfg, vocab
        self.multipliers = multipliers(cfg)

    @property
    def pad(self) -> int:
        """The compressed pad id."""
        return int(self.vocab[self.cfg.engram_pad_token_id])

    def __call__(self, ngrams: torch.Tensor) -> list[np.ndarray]:
        """ngrams int [T, n]: ids of the row's token and its n-1 predecessors, newest first, -1 where
        there is none -> table rows int64 [T, (n-1) * heads] per Engram layer, on the host."""
        ids = ngrams.cpu().numpy().astype(np.int64)
        valid = (ids >= 0) & (ids != self.cfg.image_token_id)
        u = apply_pad(self.vocab[np.where(valid, ids, 0)], valid, self.pad)
        return [ngram_rows(u, m, p) for m, p in zip(self.multipliers, self.cfg.engram_primes, strict=True)]


class Engram(nn.Module):
    """One layer's projection and gate; the table itself is no parameter."""

    table: EngramTable

    def __init__(self, cfg: ModelConfig, settings: Settings):
        super().__init__()
        self.cfg = cfg
        self.wkv = Fp8Linear((cfg.hc_mult + 1) * cfg.hidden_size, cfg.engram_columns * cfg.engram_head_dim, settings)
        self.q_weight = raw((cfg.hc_mult, cfg.hidden_size), torch.bfloat16)
        self.k_weight = raw((cfg.hc_mult, cfg.hidden_size), torch.bfloat16)

    def forward(self, stream: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """stream [T, c, D], the table's rows side by side [T, C * dim] -> stream with the gated memory added."""
        projected = self.wkv(memory).unflatten(-1, (-1, self.cfg.hidden_size))
        key, value = projected[:, :-1], projected[:, -1]
        return engram_gate(stream, key, value, self.q_weight, self.k_weight, self.cfg.rms_norm_eps)
