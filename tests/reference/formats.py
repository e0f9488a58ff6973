# SPDX-License-Identifier: Apache-2.0
"""Number formats of the checkpoint and of the caches, in float64.

Every quantiser here is "fake": it returns the float64 values that the stored codes stand for.
All divisions ``x / s`` are rounded to float32 before they meet the grid, as the contract asks.
"""

import torch

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pow2(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent, exactly, for an integer tensor in [-1022, 1023]; float64."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _round_to_mini_float(x: torch.Tensor, mantissa_bits: int, min_exponent: int) -> torch.Tensor:
    """Round to nearest, ties to the even mantissa, with gradual underflow; float64."""
    exponent = torch.frexp(x)[1].to(torch.int64) - 1
    step = pow2(exponent.clamp_min(min_exponent) - mantissa_bits)
    return torch.round(x / step) * step


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest float8_e4m3fn values (RNE, saturating at 448); float64 of the same shape."""
    return _round_to_mini_float(x.double(), 3, -6).clamp(-E4M3_MAX, E4M3_MAX)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest values of the grid 0, .5, 1, 1.5, 2, 3, 4, 6 (RNE, saturating); float64."""
    return _round_to_mini_float(x.double(), 1, 0).clamp(-E2M1_MAX, E2M1_MAX)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Nearest bfloat16 values (through float32); float64."""
    return x.to(torch.float32).to(torch.bfloat16).double()


def ceil_log2_ratio(a: torch.Tensor, largest: float) -> torch.Tensor:
    """The least integer e with ``largest * 2**e >= a``, without any rounding; int64."""
    mantissa_a, exponent_a = torch.frexp(a.double())
    mantissa_m, exponent_m = torch.frexp(torch.tensor(largest, dtype=torch.float64))
    exponent = exponent_a.to(torch.int64) - int(exponent_m)
    return exponent + (mantissa_a > float(mantissa_m))


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"{x.shape[-1]} columns are not a multiple of the group of {group}")
    return x.double().unflatten(-1, (x.shape[-1] // group, group))


def quant_fp8(x: torch.Tensor, group: int = 32) -> torch.Tensor:
    """E4M3 with a power-of-two scale per ``group`` columns of the last dimension (facts 2.1)."""
    g = _grouped(x, group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    s = pow2(ceil_log2_ratio(amax, E4M3_MAX))
    return (round_e4m3((g / s).to(torch.float32)) * s).flatten(-2)


def quant_kv_fp4(x: torch.Tensor, group: int = 16) -> torch.Tensor:
    """Global KV rows: E2M1 with an E4M3 scale per 16 columns (facts 2.1)."""
    g = _grouped(x, group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    s = round_e4m3((amax / E2M1_MAX).to(torch.float32))
    return (round_e2m1((g / s).to(torch.float32)) * s).flatten(-2)


def quant_index_fp4(x: torch.Tensor, group: int = 32) -> torch.Tensor:
    """Index keys and queries: E2M1 with a power-of-two scale per 32 columns (facts 2.1)."""
    g = _grouped(x, group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    s = pow2(ceil_log2_ratio(amax, E2M1_MAX))
    return (round_e2m1((g / s).to(torch.float32)) * s).flatten(-2)


def quant_v4_record(x: torch.Tensor, rope_dim: int, group: int = 64) -> torch.Tensor:
    """The 584 B record: fp8 per 64 columns without the RoPE part, which is kept in bf16.

    A tail shorter than 64 columns (small test sizes) is a group of its own.
    """
    nope = x.shape[-1] - rope_dim
    parts = [quant_fp8(p, p.shape[-1]) for p in x[..., :nope].split(group, -1)]
    return torch.cat([*parts, round_bf16(x[..., nope:])], -1)


def quant_index_fp8(x: torch.Tensor) -> torch.Tensor:
    """Index rows where FP4 is missing: E4M3 with one power-of-two scale for the row."""
    return quant_fp8(x, x.shape[-1])


def e8m0_values(raw: torch.Tensor) -> torch.Tensor:
    """Scale bytes (float8_e8m0fnu or uint8) to 2**(byte - 127), float64."""
    return pow2(raw.view(torch.uint8).to(torch.int64) - 127)


def decode_fp8(weight: torch.Tensor, scale: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """E4M3 ``weight`` [out, in] with E8M0 ``scale`` [ceil(out/tile0), ceil(in/tile1)]; float64."""
    s = e8m0_values(scale).repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    rows, columns = weight.shape
    return weight.to(torch.float32).double() * s[:rows, :columns]


def decode_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed E2M1 [out, in/2] (low nibble = even column), scale [out, in/32]; float64 [out, in]."""
    grid = torch.tensor([*E2M1_GRID, *(-v for v in E2M1_GRID)], dtype=torch.float64)
    codes = packed.view(torch.uint8).to(torch.int64)
    values = grid.to(packed.device)[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2)
    return values * e8m0_values(scale).repeat_interleave(32, 1)
