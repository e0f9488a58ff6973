# SPDX-License-Identifier: Apache-2.0
"""Block-scaled rows: quantise to (codes, scales) and back; `round_*` do both at once."""

from __future__ import annotations

import torch

from .scalar import (
    E2M1_MAX, E4M3_MAX, ceil_log2, e2m1_codes, e2m1_values, e4m3, e8m0_decode, pow2, unpack_nibbles, widened,
)

FP8_BLOCK = 32
INDEX_BLOCK = 32
GLOBAL_BLOCK = 16


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, block))


def fp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., n] -> (E4M3 values [..., n], exponents e [..., n/32] int32), value = q * 2^e.

    Per 32 columns: a = max(max|x|, 1e-4), 2^e = 2^ceil(log2(a/448)).  (v41-facts 2.1)
    """
    b = _blocks(x, FP8_BLOCK)
    exponent = ceil_log2(b.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX)
    q = e4m3(b * pow2(-exponent, b.dtype)[..., None])
    return q.flatten(-2), exponent


def fp8_dequantize(q: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `fp8_quantize`, in `dtype`."""
    return (_blocks(q.to(dtype), FP8_BLOCK) * pow2(exponent, dtype)[..., None]).flatten(-2)


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as the FP8 Linears and the window cache see it; same shape and dtype."""
    wide = widened(x)
    return fp8_dequantize(*fp8_quantize(wide), dtype=wide.dtype).to(x.dtype)


def global_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., n] -> (E2M1 codes [..., n], E4M3 scales [..., n/16]).

    Per 16 columns: s = e4m3(max(max|x|, 6 * 2^-9) / 6).  (v41-facts 2.1)
    """
    b = _blocks(x, GLOBAL_BLOCK)
    scale = e4m3(b.abs().amax(-1).clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX)
    return e2m1_codes(b / scale.to(b.dtype)[..., None]).flatten(-2), scale


def global_dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `global_quantize`, in `dtype`."""
    return (_blocks(e2m1_values(codes, dtype), GLOBAL_BLOCK) * scale.to(dtype)[..., None]).flatten(-2)


def index_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., n] -> (E2M1 codes [..., n], exponents [..., n/32] int32).

    Per 32 columns: 2^e = 2^ceil(log2(max(max|x|, 6 * 2^-126) / 6)).  (v41-facts 2.1)
    """
    b = _blocks(x, INDEX_BLOCK)
    exponent = ceil_log2(b.abs().amax(-1).clamp(min=E2M1_MAX * 2.0**-126) / E2M1_MAX)
    return e2m1_codes(b * pow2(-exponent, b.dtype)[..., None]).flatten(-2), exponent


def dense_weight(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E4M3 [o, i] under E8M0 bytes [ceil(o/32), ceil(i/32)] -> [o, i] in `dtype` (exact in bf16)."""
    s = e8m0_decode(scale, dtype).repeat_interleave(32, 0)[: weight.shape[0]]
    return weight.to(dtype) * s.repeat_interleave(32, 1)[:, : weight.shape[1]]


def mxfp4_rows(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E2M1 pairs [..., n/2] under E8M0 bytes [..., n/32] -> [..., n] in `dtype` (exact in bf16): the
    format of expert weights and index keys."""
    values = _blocks(e2m1_values(unpack_nibbles(packed), dtype), 32)
    return (values * e8m0_decode(scale, dtype)[..., None]).flatten(-2)


def scaled_rows(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E4M3 rows [..., n] under E8M0 bytes [..., n/32] -> [..., n] in `dtype`: the Engram table's format."""
    return (_blocks(q.to(dtype), 32) * e8m0_decode(scale, dtype)[..., None]).flatten(-2)
