# SPDX-License-Identifier: Apache-2.0
"""`write_record` in one launch, a warp a row.  Importing this module imports Triton.

A record is what `record.encode` gives of the latent returned: products and sums are not fused, the angles' cosines and
sines are float64's, and every rounding is `formats`'.  A row's bits are its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.records import Fp8IndexRecord, Fp8RopeRecord, GlobalRecord, IndexRecord, Record, WindowRecord
from ..rope.triton_angles import cos_sin
from . import reference
from ..triton_rounding import power_of_two, to_bf16
from .triton_codes import e2m1_codes, e4m3_bytes, e4m3_values, fp4_exponent, fp8_exponent

# Values under one scale.
GROUPS = {WindowRecord: 32, GlobalRecord: 16, IndexRecord: 32, Fp8RopeRecord: 64, Fp8IndexRecord: 0}


def write_record(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, positions: torch.Tensor, freq: torch.Tensor,
    slots: torch.Tensor, cache: torch.Tensor, record: Record, ratio: int = 1, block_size: int | None = None,
) -> torch.Tensor:
    """`reference.write_record`, which also runs here for anything but bf16, for sizes that are not powers of two, and for V4's record without its 64 RoPE values."""
    rows, dim = x.shape
    if not _taken(x, freq, cache, record):
        return reference.write_record(x, norm_weight, eps, positions, freq, slots, cache, record, ratio, block_size)
    latent = x if norm_weight is None else torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    if rows:
        _write[(rows,)](
            x, x.stride(0), norm_weight, float(eps), positions.contiguous(), freq, slots.contiguous(), cache, cache.stride(0), latent, block_size or cache.shape[1] * ratio,
            D=dim, ROPE=2 * freq.shape[0], GROUP=GROUPS[type(record)] or dim, KIND=record.name, RATIO=ratio, STATE=cache.stride(1),
            NORM=norm_weight is not None, num_warps=1, enable_fp_fusion=False,
        )
    return latent


def _taken(x: torch.Tensor, freq: torch.Tensor, cache: torch.Tensor, record: Record) -> bool:
    dim, rope = x.shape[1], 2 * freq.shape[0]
    if type(record) not in GROUPS or x.dtype != torch.bfloat16 or x.stride(1) != 1 or cache.stride(2) != 1:
        return False
    if type(record) is Fp8RopeRecord and not (rope == record.rope == 64 and dim <= 512):
        return False
    return dim >= rope >= 2 and dim & (dim - 1) == 0 and rope & (rope - 1) == 0 and dim >= max(GROUPS[type(record)], 2)


@triton.jit(do_not_specialize=["block_size"], do_not_specialize_on_alignment=["positions", "slots"])
def _write(
    x, x_stride, norm_weight, eps, positions, freq, slots, cache, block_stride, latent, block_size,
    D: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, RATIO: tl.constexpr, STATE: tl.constexpr, NORM: tl.constexpr,
):
    """One row, as pairs of neighbours [D / ROPE, ROPE / 2, 2]; the last ROPE values are turned."""
    SECTIONS: tl.constexpr = D // ROPE
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    v = tl.load(x + t * x_stride + i).to(tl.float32)
    if NORM:
        w = tl.load(norm_weight + i).to(tl.float32)
        normed = to_bf16(v * tl.rsqrt(tl.sum(v * v, 0) / D + eps) * w)
        tl.store(latent + t * D + i, normed)
        v = normed.to(tl.float32)
    slot, position = tl.load(slots + t), tl.load(positions + t)
    if (slot >= 0) & ((position + 1) % RATIO == 0):
        cos, sin = cos_sin(position // RATIO * RATIO, tl.load(freq + tl.arange(0, ROPE // 2)))
        even, odd = tl.split(tl.reshape(v, [SECTIONS, ROPE // 2, 2]))
        turned_even = to_bf16(even * cos[None] - odd * sin[None]).to(tl.float32)
        turned_odd = to_bf16(even * sin[None] + odd * cos[None]).to(tl.float32)
        last = (tl.arange(0, SECTIONS) == SECTIONS - 1)[:, None]
        even, odd = tl.where(last, turned_even, even), tl.where(last, turned_odd, odd)
        token = slot.to(tl.int32)  # a cache has fewer than 2^31
        row = cache + (token // block_size).to(tl.int64) * block_stride + token % block_size // RATIO * STATE
        even, odd = tl.reshape(even, [D // GROUP, GROUP // 2]), tl.reshape(odd, [D // GROUP, GROUP // 2])
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
        group = tl.arange(0, D // GROUP)
        if KIND == "window":
            exponent = fp8_exponent(tl.maximum(largest, 1e-4))
            _fp8(row, even, odd, exponent, D, D)
            tl.store(row + D + group, (exponent + 127).to(tl.uint8))
        elif KIND == "global":
            # 6 * 2^-9
            scale = e4m3_bytes(tl.div_rn(tl.maximum(largest, 0.01171875), tl.full([D // GROUP], 6.0, tl.float32)))
            _fp4(row, even, odd, e4m3_values(scale), D)
            tl.store(row + D // 2 + group, scale)
        elif KIND == "index":
            # 6 * 2^-126
            exponent = fp4_exponent(tl.maximum(largest, 7.052966104933725e-38))
            _fp4(row, even, odd, power_of_two(exponent), D)
            tl.store(row + D // 2 + group, (exponent + 127).to(tl.uint8))
        elif KIND == "fp8_index":
            exponent = fp8_exponent(tl.maximum(largest, 1e-4))
            _fp8(row, even, odd, exponent, D, D)
            byte = tl.arange(0, 4)[None] * 8
            bits = (exponent + 127)[:, None] << 23
            tl.store(row + D + tl.arange(0, 4)[None], ((bits >> byte) & 255).to(tl.uint8))
        else:
            exponent = fp8_exponent(tl.maximum(largest, 1e-4))
            _fp8(row, even, odd, exponent, D - ROPE, D)
            # The last group is RoPE's: bf16, low byte first, and no scale.
            bits = to_bf16(tl.join(even, odd)).to(tl.int16, bitcast=True).to(tl.int32)
            both = tl.reshape(tl.join(bits & 255, (bits >> 8) & 255), [2 * D]).to(tl.uint8)
            j = tl.arange(0, 2 * D)
            tl.store(row + j - (D - ROPE), both, mask=j >= 2 * (D - ROPE))
            tl.store(row + D + ROPE + group, tl.where(group < D // GROUP - 1, exponent + 127, 0).to(tl.uint8))
            rest = tl.arange(0, 8)
            tl.store(row + D + ROPE + rest, tl.zeros([8], tl.uint8), mask=rest >= D // GROUP)


@triton.jit
def _fp8(row, even, odd, exponent, WIDTH: tl.constexpr, D: tl.constexpr):
    """E4M3 bytes of the first WIDTH values."""
    scale = power_of_two(-exponent)[:, None]
    codes = tl.join(e4m3_bytes(even * scale), e4m3_bytes(odd * scale))
    i = tl.arange(0, D)
    tl.store(row + i, tl.reshape(codes, [D]), mask=i < WIDTH)


@triton.jit
def _fp4(row, even, odd, scale, D: tl.constexpr):
    """E2M1 codes, the even element in the low nibble."""
    codes = e2m1_codes(even, scale[:, None]) | (e2m1_codes(odd, scale[:, None]) << 4)
    tl.store(row + tl.arange(0, D // 2), tl.reshape(codes.to(tl.uint8), [D // 2]))
