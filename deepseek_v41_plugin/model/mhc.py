# SPDX-License-Identifier: Apache-2.0
"""The multi-copy stream between sublayers, and the parameters that mix it.  (v41-facts 3)"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ..config import ModelConfig
from ..kernels import mhc
from .parameters import Hidden, RMSNorm, raw


class Mixer(nn.Module):
    """Predicts the mixes of a sublayer; named in the checkpoint hc_{attn,ffn}_{fn,base,scale}.

    parts: once prepared, fn as tensor cores take it.
    """

    parts: torch.Tensor | None = None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        copies = cfg.hc_mult
        rows = copies * (2 + copies)
        self.fn = raw((rows, copies * cfg.hidden_size), torch.float32)
        self.base = raw((rows,), torch.float32)
        self.scale = raw((3,), torch.float32)
        self.iterations, self.mix_eps, self.norm_eps = cfg.hc_sinkhorn_iters, cfg.hc_eps, cfg.rms_norm_eps

    def prepare(self) -> None:
        """For tensor cores; loading again calls for this again."""
        parts = mhc.prepare(self.fn)
        self.parts = parts if self.parts is None else self.parts.copy_(parts)

    def weights(self) -> mhc.MixerWeights:
        return mhc.MixerWeights(self.fn, self.base, self.scale, self.iterations, self.mix_eps, self.norm_eps, self.parts)


@dataclass(frozen=True)
class Residual:
    """The stream [T, c, D] and the `pre` [T, c] with which the next sublayer collapses it.

    Behind a sublayer it lies open: its output y [T, D] is not in the stream yet, and post [T, c], comb [T, c, c]
    say how it gets there, on the way into the next one.
    """

    stream: torch.Tensor
    pre: torch.Tensor
    y: torch.Tensor | None = None
    post: torch.Tensor | None = None
    comb: torch.Tensor | None = None

    def enter(self, mixer: Mixer, norm: RMSNorm) -> tuple[Hidden, Residual]:
        """The next sublayer's input, and the stream as it waits for its output (see `left`)."""
        given = self.pre, mixer.weights(), norm.weight, norm.eps, norm.rows8
        if self.y is None:
            stream, entered = self.stream, mhc.enter(self.stream, *given)
        else:
            stream, entered = mhc.turn(self.stream, self.y, self.post, self.comb, *given)
        return Hidden(entered.x, entered.fp8), Residual(stream, entered.pre, None, entered.post, entered.comb)

    def left(self, y: torch.Tensor) -> Residual:
        """Behind the sublayer."""
        return replace(self, y=y)

    def closed(self) -> Residual:
        """With y in the stream."""
        return self if self.y is None else Residual(mhc.leave(self.stream, self.y, self.post, self.comb), self.pre)

    def rows(self, kept: torch.Tensor) -> Residual:
        """Only rows int64 [K]."""
        parts = self.stream, self.pre, self.y, self.post, self.comb
        return Residual(*(part if part is None else part[kept] for part in parts))

    def hidden(self) -> torch.Tensor:
        """The copies collapsed, before the norm: [T, D] in the accumulator's dtype."""
        closed = self.closed()
        return mhc.collapse(closed.stream, closed.pre)

    def last(self, norm: RMSNorm) -> torch.Tensor:
        """`hidden`, normed: the end of the model."""
        if self.y is None:
            return norm(self.hidden())
        return mhc.last(self.stream, self.y, self.post, self.comb, self.pre, norm.weight, norm.eps)
