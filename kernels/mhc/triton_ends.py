# SPDX-License-Identifier: Apache-2.0
"""`leave` and `last`: the stream expanded, and expanded, collapsed and normed at the end of the model; one launch each.

Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_rounding import to_bf16
from . import reference
from .triton_turn import taken

BLOCK = 1024


def leave(stream: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """`reference.expand`, which also runs here for anything but 4 copies in bf16."""
    if not taken(stream):
        return reference.expand(stream, y, post, comb)
    rows, _, dim = stream.shape
    out = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    if rows:
        _leave[(rows, triton.cdiv(dim, BLOCK))](stream.contiguous(), y.contiguous(), post.contiguous(), comb.contiguous(), out, D=dim, BLOCK=BLOCK, num_warps=4)
    return out


def last(
    stream: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, pre: torch.Tensor,
    norm_weight: torch.Tensor, norm_eps: float,
) -> torch.Tensor:
    """`reference.last`, which also runs here for anything but 4 copies in bf16."""
    if not taken(stream):
        return reference.last(stream, y, post, comb, pre, norm_weight, norm_eps)
    rows, _, dim = stream.shape
    out = torch.empty(rows, dim, dtype=stream.dtype, device=stream.device)
    if rows:
        _last[(rows,)](
            stream.contiguous(), y.contiguous(), post.contiguous(), comb.contiguous(), pre.contiguous(), norm_weight, float(norm_eps), out,
            D=dim, BLOCK=triton.next_power_of_2(dim), num_warps=16,
        )
    return out


@triton.jit
def _expanded(x0, x1, x2, x3, y, post, comb, J: tl.constexpr):
    """Copy J behind the sublayer, in bf16."""
    mixed = tl.load(comb + J) * x0.to(tl.float32)
    mixed += tl.load(comb + 4 + J) * x1.to(tl.float32)
    mixed += tl.load(comb + 8 + J) * x2.to(tl.float32)
    mixed += tl.load(comb + 12 + J) * x3.to(tl.float32)
    mixed += tl.load(post + J) * y.to(tl.float32)
    return to_bf16(mixed)


@triton.jit
def _leave(stream, y, post, comb, out, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    stream += t * (4 * D) + d
    x0 = tl.load(stream, mask=mask)
    x1 = tl.load(stream + D, mask=mask)
    x2 = tl.load(stream + 2 * D, mask=mask)
    x3 = tl.load(stream + 3 * D, mask=mask)
    add = tl.load(y + t * D + d, mask=mask)
    for j in tl.static_range(4):
        tl.store(out + t * (4 * D) + j * D + d, _expanded(x0, x1, x2, x3, add, post + t * 4, comb + t * 16, j), mask=mask)


@triton.jit
def _last(stream, y, post, comb, pre, norm_weight, norm_eps, out, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    stream += t * (4 * D) + d
    x0 = tl.load(stream, mask=mask, other=0.0)
    x1 = tl.load(stream + D, mask=mask, other=0.0)
    x2 = tl.load(stream + 2 * D, mask=mask, other=0.0)
    x3 = tl.load(stream + 3 * D, mask=mask, other=0.0)
    add = tl.load(y + t * D + d, mask=mask, other=0.0)
    mean = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(4):
        mean += tl.load(pre + t * 4 + j) * _expanded(x0, x1, x2, x3, add, post + t * 4, comb + t * 16, j).to(tl.float32)
    w = tl.load(norm_weight + d, mask=mask, other=0.0).to(tl.float32)
    mean = mean * tl.rsqrt(tl.sum(mean * mean, 0) / D + norm_eps) * w
    tl.store(out + t * D + d, to_bf16(mean), mask=mask)
