# SPDX-License-Identifier: Apache-2.0
"""The router behind its matrix product in one launch: scores, top-k, weights, slots and load.

Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import invariant
from ..linear import wide_linear
from . import reference
from .replicas import GOLDEN, Replicas

# Below every key, which lie above -2^48 with 65,536 experts.
_NEVER = tl.constexpr(-(1 << 62))
_GOLDEN = tl.constexpr(GOLDEN)


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
    top_k: int, scaling: float, temperature: float = 1.0, replicas: Replicas | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.route`, which also runs here for float64 and while `invariant` is switched on.

    Ids and load are the reference's wherever float32 can tell two scores apart; weights to a few ulp.
    """
    if x.dtype == torch.float64 or invariant.enabled():
        return reference.route(x, weight, bias, top_k, scaling, temperature, replicas)
    return pick(wide_linear(x, weight), bias, top_k, scaling, temperature, replicas)


def pick(
    logits: torch.Tensor, bias: torch.Tensor,
    top_k: int, scaling: float, temperature: float = 1.0, replicas: Replicas | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` behind the product: logits float32 [T, E], up to 65,536 experts."""
    rows, experts = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if not rows:
        return ids, weights
    r = replicas
    tensors = (None,) * 5 if r is None else (r.slots, r.counts, r.load, r.record, r.rows)
    _route[(rows,)](
        logits, logits.stride(0), bias, ids, weights, *tensors,
        *((0, 0, 0, 0, 0) if r is None else (*r.slots.stride(), r.counts.stride(0), r.load.stride(0), r.first)),
        experts, float(scaling), float(temperature), TOP_K=top_k, REPLICAS=r is not None,
        EXPERTS=triton.next_power_of_2(experts), CHOSEN=triton.next_power_of_2(top_k), num_warps=1,
    )
    return ids, weights


@triton.jit
def _softplus(x):
    """max(x, 0) + log1p(u), u = exp(-|x|): log1p(u) = 2 atanh(z), z = u / (2 + u) <= 1/3, as its series up to z^13.

    What the series leaves out is below 2e-8 of it, a third of float32's last bit, and no small u is lost in 1 + u.
    """
    u = tl.exp(-tl.abs(x))
    z = u / (2 + u)
    q = z * z
    series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q / 13)))))
    return tl.where(x > 0, x, 0) + 2 * z * series


@triton.jit
def _key(x, column, EXPERTS: tl.constexpr):
    """int64 that orders as (x descending, column ascending), NaN first as torch sorts it."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64)
    return ordered * EXPERTS + (EXPERTS - 1 - column)


@triton.jit
def _route(
    logits, logits_stride, bias, ids, weights, slots, counts, load, record, rows,
    slots_stride, slot_stride, counts_stride, load_stride, first,
    experts, scaling, temperature, TOP_K: tl.constexpr, REPLICAS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):
    """One row: `logits` [T, experts], `bias` [experts] -> `ids`, `weights` [T, TOP_K]. EXPERTS and CHOSEN are powers of 2."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, EXPERTS)
    real = column < experts
    x = tl.load(logits + t * logits_stride + column, mask=real, other=0.0)
    scores = tl.sqrt_rn(_softplus(tl.div_rn(x, tl.full([EXPERTS], temperature, tl.float32))))
    key = _key(scores + tl.load(bias + column, mask=real, other=0.0).to(tl.float32), column, EXPERTS)
    key = tl.where(real, key, _NEVER)

    place = tl.arange(0, CHOSEN)
    wanted = place < TOP_K
    chosen = tl.zeros([CHOSEN], tl.int64)
    share = tl.zeros([CHOSEN], tl.float32)
    for i in tl.static_range(TOP_K):
        best = EXPERTS - 1 - (tl.max(key, 0) & (EXPERTS - 1))
        chosen = tl.where(place == i, best, chosen)
        share = tl.where(place == i, tl.sum(tl.where(column == best, scores, 0.0), 0), share)
        key = tl.where(column == best, _NEVER, key)
    share = share / (tl.sum(share, 0) + 1e-20) * scaling
    tl.store(weights + t * TOP_K + place, share, mask=wanted)

    if REPLICAS:
        count = tl.load(counts + chosen * counts_stride, mask=wanted, other=1).to(tl.int64)
        which = ((((first + t) * _GOLDEN) & 0xFFFFFFFF) * count) >> 32
        chosen = tl.load(slots + chosen * slots_stride + which * slot_stride, mask=wanted, other=0).to(tl.int64)
        # A sum, so that the condition of the row is as wide as the mask.
        counted = (place * 0 + t < tl.load(rows)) & (place * 0 + tl.load(record).to(tl.int32) != 0)
        tl.atomic_add(load + chosen * load_stride, 1, mask=wanted & counted, sem="relaxed")
    tl.store(ids + t * TOP_K + place, chosen, mask=wanted)
