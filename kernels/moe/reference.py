# SPDX-License-Identifier: Apache-2.0
"""The plain form of the MoE.  (v41-facts 5)"""

from __future__ import annotations

import torch

from ..formats.blocks import mxfp4_rows, round_fp8
from ..formats.rowfp8 import RowFp8
from ..invariant import linear, row_op
from .replicas import Replicas, place


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
    top_k: int, scaling: float, temperature: float = 1.0, replicas: Replicas | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: x [T, D], weight [E, D], bias [E] -> (ids [T, k] int64, weights [T, k]).

    s = sqrt(softplus(x Wg^T / temperature)) in float32 or wider; the bias decides which experts,
    never how much: weights are s over their sum, times `scaling`.  Ties go to the lower expert.
    With `replicas` the ids are physical slots (see `replicas.place`); the weights are the same.
    """
    ids, weights = choose(x, weight, bias, top_k, scaling, temperature)
    return ids if replicas is None else place(ids, replicas), weights


@row_op(1)
def choose(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
    top_k: int, scaling: float, temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` without replicas: each row by itself."""
    return pick(logits(x, weight), bias, top_k, scaling, temperature)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wg^T [T, E] in float32 or wider."""
    acc = torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(acc), weight.to(acc))


def pick(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float, temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose` behind the product: logits [T, E]."""
    scores = torch.nn.functional.softplus(logits / temperature).sqrt()
    ids = (scores + bias.to(scores.dtype)).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


@row_op(2, apart=True)
def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor,
    limit: float, first_expert: int = 0, quantize: bool = True,
    fp8: RowFp8 | None = None, narrow: bool = False, beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum_e w2_e(Q(swiglu(w13_e Q(x)) * weight_e)) over the chosen experts held here.

    x [T, D]; ids, weights [T, k]; w13 uint8 [E, 2F, D/2] with scales [E, 2F, D/32]; w2 uint8
    [E, D, F/2] with scales [E, D, F/32].  The E experts held are first_expert .. first_expert+E-1;
    others add nothing.  Returns [T, D] in the accumulator's dtype (float32, or float64); with `beside` [T, D], its
    sum with that, in that dtype.
    For faster forms only, and not looked at here: `fp8`, x already rounded; `narrow`, what `spread_ok` said of both scales.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=acc, device=x.device)
    q = round_fp8(x) if quantize else x
    for e in torch.unique(ids).tolist():
        local = e - first_expert
        if not 0 <= local < w13.shape[0]:
            continue
        row, slot = torch.where(ids == e)
        gate, up = linear(q[row], mxfp4_rows(w13[local], w13_scale[local], x.dtype)).chunk(2, -1)
        h = (swiglu(gate.to(acc), up.to(acc), limit) * weights[row, slot, None].to(acc)).to(x.dtype)
        if quantize:
            h = round_fp8(h)
        y = linear(h, mxfp4_rows(w2[local], w2_scale[local], x.dtype))
        out.index_add_(0, row, y.to(acc))
    return out if beside is None else (out + beside.to(acc)).to(beside.dtype)
