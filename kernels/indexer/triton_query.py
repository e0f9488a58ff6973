# SPDX-License-Identifier: Apache-2.0
"""Queries as the score kernel takes them, and its tiles of rows: one launch.  Importing this module imports Triton.

A tile is up to ROWS adjacent rows of one request, cut from its first row on (of those in the slice of rows at hand):
  tiles int32 [n, 4]: (first row, rows, request, visible keys of the row that sees most and needs scores), all 0 where a tile is empty.
Request r's tiles begin at r * per, or (per = 0) at first[r] // ROWS + r: that leaves room for each one's rows, whatever they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rope.triton_angles import cos_sin
from ..triton_rounding import INTERPRETED, power_of_two
from .triton_decode import FP4_BIAS, fp4_place


@triton.jit
def _ceil_log2(x):
    """ceil(log2(x)) of normal float32 x > 0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def _to_step(x, magic):
    """x to the nearest multiple of 2^-23 magic / 1.5, ties to even; |x| < magic / 4."""
    return (x + magic) - magic


@triton.jit
def _e2m1(x):
    """Round |x| <= 6 to E2M1's grid: steps of 1/2, 1 and 2."""
    a = tl.abs(x)
    magic = tl.where(a < 2, 6291456.0, tl.where(a < 4, 12582912.0, 25165824.0))
    return tl.where(x < 0, -_to_step(a, magic), _to_step(a, magic))


@triton.jit
def _e4m3(x):
    """Round |x| <= 448 to E4M3's grid: 3 bits behind the first, down to 2^-9."""
    a = tl.abs(x)
    exponent = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    magic = 12582912.0 * power_of_two(exponent - 3)
    return tl.where(x < 0, -_to_step(a, magic), _to_step(a, magic))


@triton.jit
def _kept(x, dtype: tl.constexpr):
    """float32 as it comes back from `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter cuts off what it should round
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def _request_of(tile, first, requests, per, begin, ROWS: tl.constexpr):
    """The last request whose tiles begin at `tile` or before."""
    if per > 0:
        return tl.minimum(tile // per, requests - 1)
    found = tile * 0
    for at in range(0, requests, 256):
        r = at + tl.arange(0, 256)
        row = tl.load(first + r, mask=r < requests, other=0)
        base = (tl.maximum(row - begin, 0)).to(tl.int32) // ROWS + r
        found += tl.sum(((r < requests) & (base <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit(do_not_specialize=["requests", "begin", "end", "per", "everything"])
def _query(
    q, q_stride, weights, weights_stride, positions, freq, first, out, out_weights, tiles,
    requests, begin, end, per, ratio, everything,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, FP4: tl.constexpr,
):
    """Row program_id(1) of tile program_id(0): `out` [rows of the slice, HEADS, DIM] and `out_weights` [.., HEADS] of it.

    FP4: bf16, columns where the decoded keys have them; else E4M3 under a scale that the weight takes over.
    everything: rows with as many visible keys or fewer need no scores.
    """
    tile = tl.program_id(0)
    r = _request_of(tile, first, requests, per, begin, ROWS)
    # Rows of the request in the slice, and where they start.
    start = tl.minimum(tl.maximum(tl.load(first + r), begin), end)
    stop = tl.minimum(tl.maximum(tl.load(first + r + 1), begin), end)
    if per > 0:
        base = r * per
    else:
        base = (start - begin).to(tl.int32) // ROWS + r
    row0 = start + (tile - base) * ROWS
    count = tl.minimum(tl.maximum(stop - row0, 0), ROWS).to(tl.int32)
    i = tl.program_id(1)
    if i == 0:
        rows = tl.arange(0, ROWS)
        visible = (tl.load(positions + row0 + rows, mask=rows < count, other=-1) + 1) // ratio
        most = tl.max(tl.where(visible > everything, visible, 0), 0).to(tl.int32)
        at = tiles + tile * 4
        live = count > 0
        tl.store(at, tl.where(live, row0, 0).to(tl.int32))
        tl.store(at + 1, count)
        tl.store(at + 2, tl.where(live, r, 0).to(tl.int32))
        tl.store(at + 3, tl.where(live, most, 0))
    if i < count:
        t = (row0 + i).to(tl.int64)
        to = t - begin
        head = tl.arange(0, HEADS)[:, None]
        pair = tl.arange(0, DIM // 2)
        position = tl.load(positions + t)
        turned = pair - (DIM - ROPE) // 2
        f = tl.load(freq + turned, mask=turned >= 0, other=0.0)
        cos, sin = cos_sin(position, f)
        cos, sin = cos[None], sin[None]
        from_ = q + t * q_stride + head * DIM + 2 * pair[None]
        x = tl.load(from_).to(tl.float32)
        y = tl.load(from_ + 1).to(tl.float32)
        # As the model keeps them: rounded to q's type behind the rotation.
        even = _kept(x * cos - y * sin, q.dtype.element_ty)
        odd = _kept(x * sin + y * cos, q.dtype.element_ty)
        size = tl.maximum(tl.abs(even), tl.abs(odd))
        w = tl.load(weights + t * weights_stride + tl.arange(0, HEADS)).to(tl.float32)
        if FP4:
            largest = tl.max(tl.reshape(size, [HEADS, DIM // 32, 16]), 2)
            exponent = _ceil_log2(tl.div_rn(tl.maximum(largest, 6 * 1.1754943508222875e-38), tl.full(largest.shape, 6.0, tl.float32)))
            up = tl.reshape(tl.broadcast_to(power_of_two(-exponent)[:, :, None], [HEADS, DIM // 32, 16]), [HEADS, DIM // 2])
            down = tl.reshape(tl.broadcast_to(power_of_two(exponent)[:, :, None], [HEADS, DIM // 32, 16]), [HEADS, DIM // 2])
            to_ = out + (to * HEADS + head) * DIM
            tl.store(to_ + fp4_place(2 * pair)[None], (_e2m1(even * up) * down).to(tl.bfloat16))
            tl.store(to_ + fp4_place(2 * pair + 1)[None], (_e2m1(odd * up) * down).to(tl.bfloat16))
            w = w * FP4_BIAS
        else:
            largest = tl.max(size, 1)
            exponent = _ceil_log2(tl.div_rn(tl.maximum(largest, 1e-4), tl.full(largest.shape, 448.0, tl.float32)))
            up = power_of_two(-exponent)[:, None]
            to_ = out + (to * HEADS + head) * DIM + 2 * pair[None]
            tl.store(to_, _e4m3(even * up).to(tl.float8e4nv))
            tl.store(to_ + 1, _e4m3(odd * up).to(tl.float8e4nv))
            w = w * power_of_two(exponent)
        # Half: the score kernel adds relu twice.
        tl.store(out_weights + to * HEADS + tl.arange(0, HEADS), 0.5 * w)
