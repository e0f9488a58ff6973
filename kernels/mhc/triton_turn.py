# SPDX-License-Identifier: Apache-2.0
"""Out of a sublayer and into the next in two launches.

`_sums` reads the stream once: expands it, writes it, collapses it and multiplies it with fn on the tensor cores.
`_finish` (triton_finish.py) adds the partial sums and makes the mixes, the norm and the FP8 rows.

A row's bits depend on D alone: the products of a chunk of CHUNK columns of all copies start from zero, 8 chunks
are added in order, then the groups of 8, whether a program does one chunk (few rows) or a group (many).  Tiles of
16 rows take another instruction than those of 64 and 128, so the batch-invariant mode leaves them out.
Importing this module imports Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import invariant
from ..latent.triton_codes import bf16_dot, to_bf16_once
from . import reference
from .triton_finish import COLUMNS, GROUP, finish
from .weights import CHUNK, Entered, MixerWeights, prepare

COPIES, MIXES = 4, 24


class Config(NamedTuple):
    """rows of a tile (16, 64 or 128), warps of its program, stages of its loads, and whether a program does a whole group of chunks."""

    rows: int
    warps: int
    stages: int
    grouped: bool


def config_for(rows: int) -> Config:
    """The table by the number of rows."""
    if rows <= 16 and not invariant.enabled():
        return Config(16, 4, 1, False)
    return Config(64, 4, 1, False) if rows <= 512 else Config(64, 4, 2, True)


def enter(
    stream: torch.Tensor, pre: torch.Tensor, mixer: MixerWeights, norm_weight: torch.Tensor, norm_eps: float, quantize: bool = True,
    config: Config | None = None,
) -> Entered:
    """`reference.enter`, which also runs here for anything but 4 copies in bf16."""
    if not taken(stream):
        return reference.enter(stream, pre, mixer, norm_weight, norm_eps, quantize)
    return _run(stream, None, None, None, pre, mixer, norm_weight, norm_eps, quantize, config)[1]


def turn(
    stream: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, pre: torch.Tensor,
    mixer: MixerWeights, norm_weight: torch.Tensor, norm_eps: float, quantize: bool = True, config: Config | None = None,
) -> tuple[torch.Tensor, Entered]:
    """`reference.turn`, which also runs here for anything but 4 copies in bf16."""
    if not taken(stream):
        return reference.turn(stream, y, post, comb, pre, mixer, norm_weight, norm_eps, quantize)
    return _run(stream, y, post, comb, pre, mixer, norm_weight, norm_eps, quantize, config)


def taken(stream: torch.Tensor) -> bool:
    """Whether the kernels take this stream."""
    return stream.dtype == torch.bfloat16 and stream.shape[1] == COPIES


def _run(stream, y, post, comb, pre, mixer, norm_weight, norm_eps, quantize, config):
    rows, _, dim = stream.shape
    config = config or config_for(rows)
    chunks = triton.cdiv(dim, CHUNK)
    per = GROUP if config.grouped else 1
    stored = triton.cdiv(chunks, per)
    device, expand = stream.device, y is not None
    stream = stream.contiguous()
    out = torch.empty(stream.shape, dtype=stream.dtype, device=device) if expand else stream
    collapsed = torch.empty(2, rows, dim, dtype=torch.int16, device=device)
    # Programs of a group are followed by a lane a row, others by a lane a column.
    partial = torch.empty((stored, COLUMNS, rows) if config.grouped else (rows, stored, COLUMNS), dtype=torch.float32, device=device)
    if rows:
        parts = prepare(mixer.fn) if mixer.parts is None else mixer.parts
        given = (y.contiguous(), post.contiguous(), comb.contiguous()) if expand else (None, None, None)
        _sums[(stored, triton.cdiv(rows, config.rows))](
            stream, *given, pre.contiguous(), parts, out, collapsed, partial, rows, per,
            D=dim, EXPAND=expand, ROWS=config.rows, CHUNK=CHUNK, GROUPED=config.grouped, num_warps=config.warps, num_stages=config.stages,
        )
    return out, finish(collapsed, partial, mixer, norm_weight, norm_eps, quantize, config.grouped)


@triton.jit(do_not_specialize=["rows", "per"])
def _sums(
    stream, y, post, comb, pre, parts, out, collapsed, partial, rows, per,
    D: tl.constexpr, EXPAND: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, GROUPED: tl.constexpr,
):
    """Chunks program_id(0) * per to + per of the rows of one tile.

    stream, out bf16 [T, 4, D]; y bf16 [T, D]; post, pre float32 [T, 4]; comb float32 [T, 4, 4]; parts bf16
    [D / CHUNK, 4, 3, 24, CHUNK]; collapsed int16 [2, T, D]: the upper and lower halves of float32; partial float32 [T, programs, 32], or
    [programs, 32, T] if GROUPED: 24 products, the sum of the stream's squares, and room.
    """
    first = tl.program_id(1).to(tl.int64) * ROWS
    stream += first * (4 * D)
    out += first * (4 * D)
    collapsed += first * D
    pre += first * 4
    if EXPAND:
        y += first * D
        post += first * 4
        comb += first * 16
    t = tl.arange(0, ROWS)
    real = t < rows - first
    n = tl.arange(0, 32)
    total = tl.zeros([ROWS, 32], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    begin = tl.program_id(0) * per
    for c in range(begin, tl.minimum(begin + per, (D + CHUNK - 1) // CHUNK)):
        d = c * CHUNK + tl.arange(0, CHUNK)
        mask = real[:, None] & (d < D)[None]
        at = t[:, None] * (4 * D) + d[None]
        if EXPAND:
            x0 = tl.load(stream + at, mask=mask, other=0.0)
            x1 = tl.load(stream + at + D, mask=mask, other=0.0)
            x2 = tl.load(stream + at + 2 * D, mask=mask, other=0.0)
            x3 = tl.load(stream + at + 3 * D, mask=mask, other=0.0)
            out_of = tl.load(y + t[:, None] * D + d[None], mask=mask, other=0.0)
        mean = tl.zeros([ROWS, CHUNK], tl.float32)
        square = tl.zeros([ROWS, CHUNK], tl.float32)
        product = tl.zeros([ROWS, 32], tl.float32)
        for j in tl.static_range(4):
            if EXPAND:
                mixed = _weight(comb + j, t, 16, real) * x0.to(tl.float32)
                mixed += _weight(comb + 4 + j, t, 16, real) * x1.to(tl.float32)
                mixed += _weight(comb + 8 + j, t, 16, real) * x2.to(tl.float32)
                mixed += _weight(comb + 12 + j, t, 16, real) * x3.to(tl.float32)
                mixed += _weight(post + j, t, 4, real) * out_of.to(tl.float32)
                x = to_bf16_once(mixed)
                tl.store(out + at + j * D, x, mask=mask)
            else:
                x = tl.load(stream + at + j * D, mask=mask, other=0.0)
            wide = x.to(tl.float32)
            mean += _weight(pre + j, t, 4, real) * wide
            square += wide * wide
            weight = parts + (c * 4 + j) * (3 * 24 * CHUNK) + n[None] * CHUNK + tl.arange(0, CHUNK)[:, None]
            for p in tl.static_range(3):
                product = bf16_dot(x, tl.load(weight + (2 - p) * (24 * CHUNK), mask=(n < 24)[None], other=0.0), product)
        # In halves: all big tensors then have 16-bit values, and one layout.
        bits = mean.to(tl.int32, bitcast=True)
        tl.store(collapsed + t[:, None] * D + d[None], (bits >> 16).to(tl.int16), mask=mask)
        tl.store(collapsed + rows.to(tl.int64) * D + t[:, None] * D + d[None], bits.to(tl.int16), mask=mask)
        total += product
        squares += tl.sum(square, 1)
    total = tl.where((n == 24)[None], squares[:, None], total)
    if GROUPED:
        at = (tl.program_id(0) * 32 + n[None]) * rows.to(tl.int64) + first + t[:, None]
    else:
        at = ((first + t[:, None]) * tl.num_programs(0) + tl.program_id(0)) * 32 + n[None]
    tl.store(partial + at, total, mask=real[:, None] & (n < 25)[None])


@triton.jit
def _weight(column, t, STRIDE: tl.constexpr, real):
    """[ROWS, 1]: one weight a row."""
    return tl.load(column + t * STRIDE, mask=real, other=0.0)[:, None]
