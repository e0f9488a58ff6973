# SPDX-License-Identifier: Apache-2.0
"""Scalar codecs: E8M0 scales, E4M3 bytes, E2M1 nibbles."""

from __future__ import annotations

import functools

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours of the grid; a tie goes to the even code.
_E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e8m0_encode(exponent: torch.Tensor) -> torch.Tensor:
    """Exponents e (any integer dtype) -> bytes of 2^e, clamped to 2^-127 .. 2^127."""
    return (exponent + 127).clamp_(0, 254).to(torch.uint8)


def e8m0_decode(byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E8M0 bytes b -> 2^(b-127) in `dtype`, exact (2^-127 is subnormal in float32); 255 is NaN."""
    return _e8m0_values(dtype, byte.device)[byte.long()]


@functools.cache
def _e8m0_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = [2.0 ** (b - 127) for b in range(255)] + [float("nan")]
    return torch.tensor(values, dtype=torch.float64).to(dtype).to(device)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is when it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def ceil_log2(x: torch.Tensor) -> torch.Tensor:
    """ceil(log2(x)) of positive x as int32, exact: frexp gives x = m * 2^e with m in [0.5, 1)."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def pow2(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^e in `dtype` for -1022 <= e <= 1023, exact: the bits of a double."""
    return ((exponent.long() + 1023) << 52).view(torch.float64).to(dtype)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 (float8_e4m3fn), saturating at 448; x is taken as float32 first."""
    return x.float().clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@functools.cache
def _edges(device: torch.device) -> torch.Tensor:
    """Kept on the device: copying them in each step would wait for it."""
    return torch.tensor(_E2M1_EDGES, device=device)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1, saturating at 6: codes 0..15 (uint8), bit 3 the sign; x is taken as float32."""
    x = x.float()
    edges = _edges(x.device)
    a = x.abs()
    below = torch.bucketize(a, edges, right=False)  # an edge counts as the lower code
    above = torch.bucketize(a, edges, right=True)  # an edge counts as the upper code
    code = torch.where(below % 2 == 0, below, above)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def e2m1_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E2M1 codes 0..15 -> values in `dtype`."""
    return _e2m1_values(dtype, codes.device)[codes.long()]


@functools.cache
def _e2m1_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([*E2M1_GRID, *(-v for v in E2M1_GRID)], dtype=dtype, device=device)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., n] -> bytes [..., n/2]; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """bytes [..., n/2] -> uint8 codes [..., n]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
