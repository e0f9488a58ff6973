# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of RoPE's angles inside Triton kernels.  Importing this module imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cos_sin(position, freq):
    """position int64, freq float64 [n] -> float32 cosines and sines [n] of position * freq < 2^20.

    Float64 up to the last step: the nearest multiple of pi/2 is taken off in three parts, the first two of 33 bits so that
    their products are exact; then Taylor's series up to 15! and 16!, whose rest is below 1e-16.  So they are float64's
    cosine and sine rounded to float32, but for one in 10^8 or so.
    """
    angle = position.to(tl.float64) * freq
    turns = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = angle - turns * 1.5707963267341256
    x = x - turns * 6.077100506303966e-11
    x = x - turns * 2.0222662487959506e-21
    z = x * x
    s = -1 / 39916800 + z * (1 / 6227020800 + z * (-1 / 1307674368000))
    s = -1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880 + z * s)))
    s = x + x * z * s
    c = 1 / 479001600 + z * (-1 / 87178291200 + z * (1 / 20922789888000))
    c = 1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * (-1 / 3628800 + z * c)))
    c = 1 - 0.5 * z + z * z * c
    quarter = turns.to(tl.int64) & 3
    cos = tl.where((quarter & 1) == 0, c, s)
    sin = tl.where((quarter & 1) == 0, s, c)
    cos = tl.where((quarter == 1) | (quarter == 2), -cos, cos)
    sin = tl.where(quarter >= 2, -sin, sin)
    return cos.to(tl.float32), sin.to(tl.float32)
