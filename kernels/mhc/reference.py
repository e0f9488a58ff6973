# SPDX-License-Identifier: Apache-2.0
"""The plain form of mHC.  (v41-facts 3)"""

from __future__ import annotations

import torch

from ..invariant import linear, row_op
from ..norm import rms_norm
from .weights import Entered, MixerWeights


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 when the activations already are."""
    return torch.promote_types(dtype, torch.float32)


@row_op(1)
def mixes(
    stream: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor,
    iterations: int, mix_eps: float, norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three mixes a sublayer predicts from its input stream.

    stream [T, c, D]; fn [2c + c*c, c*D], base [2c + c*c], scale [3], all float32.
    Returns pre [T, c] for the NEXT sublayer, post [T, c] and comb [T, c, c] for this one, in the
    accumulator's dtype.  comb is Sinkhorn-normalised: softmax, then alternating columns and rows.
    """
    acc = accumulator(stream.dtype)
    copies = stream.shape[1]
    flat = stream.flatten(1).to(acc)
    m = linear(flat, fn.to(acc)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    base, scale = base.to(acc), scale.to(acc)
    pre = torch.sigmoid(m[:, :copies] * scale[0] + base[:copies]) + mix_eps
    post = 2 * torch.sigmoid(m[:, copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    comb = (m[:, 2 * copies :] * scale[2] + base[2 * copies :]).unflatten(-1, (copies, copies))
    comb = torch.softmax(comb, -1) + mix_eps
    comb = comb / (comb.sum(-2, keepdim=True) + mix_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + mix_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + mix_eps)
    return pre, post, comb


@row_op(2)
def collapse(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_i pre[i] * X_i: stream [T, c, D], pre [T, c] -> [T, D] in pre's dtype."""
    return (stream.to(pre.dtype) * pre[..., None]).sum(1)


@row_op(4)
def expand(stream: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_j = post_j * y + sum_i comb[i, j] * X_i: y [T, D] -> stream [T, c, D] in the stream's dtype."""
    mixed = torch.einsum("tij,tid->tjd", comb, stream.to(comb.dtype))
    return (mixed + post[..., None] * y.to(post.dtype)[:, None]).to(stream.dtype)


def enter(
    stream: torch.Tensor, pre: torch.Tensor, mixer: MixerWeights, norm_weight: torch.Tensor, norm_eps: float, quantize: bool = True,
) -> Entered:
    """Into a sublayer: x = RMSNorm(collapse(stream, pre)), and the mixes of `stream`.

    stream [T, c, D], pre [T, c] of the sublayer before, norm_weight bf16 [D].  `quantize`: FP8 rows of x as
    well, from implementations that have them.
    """
    x = rms_norm(collapse(stream, pre), norm_weight, norm_eps).to(stream.dtype)
    return Entered(x, None, *mixes(stream, *mixer[:6]))


def turn(
    stream: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, pre: torch.Tensor,
    mixer: MixerWeights, norm_weight: torch.Tensor, norm_eps: float, quantize: bool = True,
) -> tuple[torch.Tensor, Entered]:
    """Out of a sublayer with its output y [T, D] and into the next: `expand`, then `enter` -> (stream', Entered).

    post, comb and pre are those of the sublayer that is left; mixer and norm the next one's.
    """
    stream = expand(stream, y, post, comb)
    return stream, enter(stream, pre, mixer, norm_weight, norm_eps, quantize)


def last(
    stream: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, pre: torch.Tensor,
    norm_weight: torch.Tensor, norm_eps: float,
) -> torch.Tensor:
    """Out of the last sublayer: RMSNorm(collapse(expand(...), pre)) [T, D] in the stream's dtype."""
    return rms_norm(collapse(expand(stream, y, post, comb), pre), norm_weight, norm_eps).to(stream.dtype)
