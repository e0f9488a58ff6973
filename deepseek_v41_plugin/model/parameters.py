# SPDX-License-Identifier: Apache-2.0
"""Parameters in the checkpoint's own formats, and how a tensor parallel rank cuts them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..kernels.formats.rowfp8 import RowFp8
from ..kernels.invariant import linear
from ..kernels.linear import RowWeight, fp8_linear, group_linear, norm_rows, pack_group, quantize_rows, row_linear, row_weight
from ..kernels.norm import rms_norm
from .settings import Settings


class Hidden(NamedTuple):
    """A Linear's input x [T, D], and the same in FP8 rows where a kernel made them on its way."""

    x: torch.Tensor
    fp8: RowFp8 | None = None

    def times(self, weight: RowWeight) -> torch.Tensor:
        """[T, D] -> [T, out] in x's dtype."""
        return row_linear(self.fp8 or quantize_rows(self.x), weight, self.x.dtype)

    def rows(self, kept: torch.Tensor) -> Hidden:
        """Only rows int64 [K]."""
        fp8 = self.fp8 and RowFp8(self.fp8.q.view(torch.uint8)[kept].view(self.fp8.q.dtype), self.fp8.scale[kept])
        return Hidden(self.x[kept], fp8)


def raw(shape: tuple[int, ...], dtype: torch.dtype, shard_dim: int | None = None) -> nn.Parameter:
    """An uninitialised, frozen parameter; `shard_dim` is the axis a rank holds its part of."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    parameter.shard_dim = shard_dim
    return parameter


class Fp8Weight(nn.Module):
    """`weight` E4M3 [out, in] and `scale` E8M0 bytes [out/32, in/32]; this rank's part of them."""

    def __init__(self, out_features: int, in_features: int, settings: Settings, shard_dim: int | None = None):
        super().__init__()
        size = [out_features, in_features]
        if shard_dim is not None:
            size[shard_dim] //= settings.shards.size
        self.weight = raw(tuple(size), torch.float8_e4m3fn, shard_dim)
        self.scale = raw((-(-size[0] // 32), -(-size[1] // 32)), torch.uint8, shard_dim)
        self.quantize = settings.activation_quant


class Fp8Linear(Fp8Weight):
    """A dense Linear.  `row`: once prepared, the weight under one scale a row, over the same memory as `weight`."""

    row: RowWeight | None = None

    def forward(self, h: Hidden | torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        h = h if isinstance(h, Hidden) else Hidden(h)
        if self.row is None:
            return fp8_linear(h.x, self.weight, self.scale, self.quantize)
        return h.times(self.row)

    def prepare(self) -> None:
        """For FP8 tensor cores, where the scales allow it.  Loading again calls for this again: what graphs hold stays
        where it is."""
        held, self.row = self.row, row_weight(self.weight.data, self.scale, in_place=True)
        if held is not None and self.row is not None:
            held.scale.copy_(self.row.scale)
            self.row = held


def join(whole: RowWeight | None, *parts: Fp8Linear) -> RowWeight | None:
    """Prepared Linears of one input as one, whose memory they then share; None if one of them has no row scales.

    whole: None, or what this returned before the parts were loaded again, into that same memory.
    """
    if any(part.row is None for part in parts):
        return None
    if whole is not None:
        return whole
    q = torch.cat([part.row.q.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    whole = RowWeight(q, torch.cat([part.row.scale for part in parts]))
    for part, q, scale in zip(parts, *(tensor.split([len(part.weight) for part in parts]) for tensor in whole), strict=True):
        part.weight.data, part.row = q, RowWeight(q, scale)
    return whole


class GroupLinear(Fp8Weight):
    """Each group of outputs sees its own inputs; the activations are not rounded.  `words`: the weight in its kernel's order."""

    words: torch.Tensor | None = None

    def forward(self, o: torch.Tensor) -> torch.Tensor:
        """[T, G, in] -> [T, G, out / G] in o's dtype."""
        return group_linear(o, self.weight if self.words is None else self.words, self.scale)

    def prepare(self) -> None:
        """As `Fp8Linear.prepare`."""
        self.words = pack_group(self.weight.data, in_place=True)


class Plain(nn.Module):
    """`weight` in bf16 [out, in], used in the caller's dtype."""

    def __init__(self, out_features: int, in_features: int):
        super().__init__()
        self.weight = raw((out_features, in_features), torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in x's dtype."""
        return linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x rms(x) weight: float32 (or wider) inside, `dtype` out.  `rows8`: whether what follows takes FP8 rows."""

    rows8 = False

    def __init__(self, dim: int, eps: float, settings: Settings):
        super().__init__()
        self.weight = raw((dim,), torch.bfloat16)
        self.eps, self.dtype, self.accumulator = eps, settings.dtype, settings.accumulator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] of any float dtype -> the same shape in the activations' dtype."""
        return rms_norm(x.to(self.accumulator), self.weight, self.eps).to(self.dtype)

    def hidden(self, x: torch.Tensor) -> Hidden:
        """`forward` of [T, dim], for Linears."""
        return Hidden(*norm_rows(x, self.weight, self.eps)) if self.rows8 else Hidden(self(x))
