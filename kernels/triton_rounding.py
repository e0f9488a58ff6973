# SPDX-License-Identifier: Apache-2.0
"""Roundings of float32 inside Triton kernels, to nearest with ties to even, compiled and under Triton's interpreter alike.

The interpreter's own casts do not round so; there the value is rounded in float32 first.  Importing this module imports Triton.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def to_bf16(x):
    """float32 -> bf16."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x):
    """float32, |x| <= 448 or NaN, -> E4M3."""
    if INTERPRETED:
        # Adding 1.5 * 2^23 of E4M3's steps leaves whole steps; they are 2^-9 from 2^-6 down.
        bits = x.to(tl.int32, bitcast=True)
        steps = (((tl.maximum((bits >> 23) & 0xFF, 121) + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        rounded = ((x + steps) - steps).to(tl.int32, bitcast=True)
        x = (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def power_of_two(exponent):
    """2^e in float32 for int32 -126 <= e <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
