# SPDX-License-Identifier: Apache-2.0
"""The plain form of the Engram gate.  (v41-facts 6, point 6)"""

from __future__ import annotations

import torch

from ..invariant import row_op


@row_op(3)
def gate_and_add(
    stream: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
) -> torch.Tensor:
    """X_h += sigmoid(sign(d) sqrt(max(|d|, 1e-6))) * value, per copy h.

    d = (sum X_h qw_h kw_h key_h) rms(X_h) rms(key_h) D^-1/2.  stream, key [T, c, D]; value [T, D];
    q_weight, k_weight [c, D].  Returns the stream in its dtype.
    """
    acc = torch.promote_types(stream.dtype, torch.float32)
    x, k = stream.to(acc), key.to(acc)
    norm = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    d = (x * q_weight.to(acc) * k_weight.to(acc) * k).sum(-1) * norm * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.sign(d) * d.abs().clamp(min=1e-6).sqrt())
    return (x + gate[..., None] * value.to(acc)[:, None]).to(stream.dtype)
