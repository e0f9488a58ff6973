# SPDX-License-Identifier: Apache-2.0
"""The MXFP4 experts on FP8 tensor cores: weights stay packed in memory and become E4M3 in registers.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import invariant
from ..formats.rowfp8 import RowFp8
from . import reference
from .triton_group import Groups, prepare, quantize_rows
from .triton_products import down, gate_up, reduce


class Config(NamedTuple):
    """How the products are cut.  Only `block_n`, `warps` and `stages` leave a row's bits alone.

    table: scales of 32 columns go into the E4M3 values (weights must be `narrow`), sums of 128 columns are scaled;
    else sums of 32 columns are.  whole_rows: what lies between the products has one scale a row (with `table` always),
    else one a `tile_f`, and it takes no launch of its own.
    tile_f (64 or 128), tile_d: rows of gate and of up, and rows of w2, in a program; block_n: pairs of a tile.
    """

    table: bool
    whole_rows: bool
    tile_f: int
    tile_d: int
    block_n: int
    warps: int
    stages: int


# Rows of a call up to which it is a decode step: another order of sums begins behind it.
DECODE_ROWS = 1024
# Rows at once: what lies between takes 150 KB a row of V4.1's.
MOST_ROWS = 16384


def choose(rows: int, k: int, experts: int, narrow: bool) -> Config:
    """The table.  While `invariant` is on every call is a decode step."""
    each = rows * k / experts
    if rows <= DECODE_ROWS or invariant.enabled():
        return Config(False, False, 64, 128, 16 if each <= 8 else 32, 4, 4)
    return Config(narrow, True, 128, 256, 64 if each <= 56 or not narrow else 128, 8, 4)


def supported(x: torch.Tensor, weights: tuple[torch.Tensor, ...], quantize: bool) -> bool:
    """bf16 rows, FP8 activations, whole blocks of 128 columns on both sides, `weights` (w13, its scale, w2, its scale) as tensor maps want them."""
    return (
        quantize and x.dtype == torch.bfloat16 and x.stride(-1) == 1 and x.shape[1] % 128 == 0 and weights[2].shape[2] % 64 == 0
        and all(w.is_contiguous() and w.data_ptr() % 16 == 0 and w.numel() // 4 < 2**31 for w in weights[1::2])
        and all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights[::2])
    )


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor,
    limit: float, first_expert: int = 0, quantize: bool = True,
    fp8: RowFp8 | None = None, narrow: bool = False, beside: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor:
    """`reference.experts` in four launches (five for many rows), which runs here itself where `supported` is False.

    A row's bits do not depend on the rows beside it, and on T only through DECODE_ROWS.  `fp8`: x, already rounded.
    `narrow`: `spread_ok` held for the scales of both weights, of all experts that can come to lie here.
    """
    if not supported(x, (w13, w13_scale, w2, w2_scale), quantize):
        return reference.experts(x, ids, weights, w13, w13_scale, w2, w2_scale, limit, first_expert, quantize, beside=beside)
    rows, k = ids.shape
    count, hidden, inner = w13.shape[0], x.shape[1], 2 * w2.shape[2]
    out = torch.empty(rows, hidden, dtype=torch.float32 if beside is None else beside.dtype, device=x.device)
    beside = beside if beside is None else beside.contiguous()
    c = config or choose(rows, k, count, narrow)
    if c.table and not c.whole_rows:
        raise ValueError("table: give whole_rows too")
    if inner % c.tile_f:
        c = c._replace(tile_f=64)
    for start in range(0, rows, MOST_ROWS):
        part = slice(start, start + MOST_ROWS)
        chosen = ids[part]
        groups, q = prepare(x[part], chosen, first_expert, count, c.block_n, fp8 and RowFp8(fp8.q[part], fp8.scale[part]))
        h = _first(q, groups, weights[part].contiguous(), w13, w13_scale, limit, k, c)
        y = _second(h, groups, w2, w2_scale, chosen.numel(), c)
        reduce[(len(chosen), triton.cdiv(hidden, 1024))](
            y, chosen, chosen.stride(0), chosen.stride(1), beside if beside is None else beside[part], out[part], hidden, first_expert, count,
            K=k, COLUMNS=1024, num_warps=4,
        )
    return out


def _words(scale: torch.Tensor) -> torch.Tensor:
    """Scales [E, rows, n] as int32 [E, rows, n / 4], one for 128 columns."""
    return scale.view(torch.int32)


def _first(q: RowFp8, groups: Groups, weights: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor, limit: float, k: int, c: Config) -> RowFp8:
    """E4M3 [slots, F] in the products' column order; scale float32 [slots], or [slots, F / tile_f]."""
    count, inner, hidden = w13.shape[0], w13.shape[1] // 2, q.q.shape[1]
    slots = groups.pair.shape[0]
    packed = TensorDescriptor(w13, [2 * count, inner, hidden // 2], [inner * hidden // 2, hidden // 2, 1], [2, c.tile_f, 64])
    dtype = torch.bfloat16 if c.whole_rows else torch.float8_e4m3fn
    h = torch.empty(slots, inner, dtype=dtype, device=w13.device)
    scale = torch.empty(0 if c.whole_rows else slots * (inner // c.tile_f), dtype=torch.float32, device=w13.device)
    tiles = inner // c.tile_f
    gate_up[(groups.expert.shape[0] * tiles,)](
        packed, _words(w13_scale), q.q, q.scale, groups.expert, groups.pair, weights, h, scale,
        hidden // 128, inner, tiles, k, float(limit),
        TILE_F=c.tile_f, BLOCK_N=c.block_n, TABLE=c.table, WHOLE_ROWS=c.whole_rows, num_warps=c.warps, num_stages=c.stages,
    )
    if c.whole_rows:
        return quantize_rows(h, groups)
    return RowFp8(h, scale)


def _second(h: RowFp8, groups: Groups, w2: torch.Tensor, w2_scale: torch.Tensor, pairs: int, c: Config) -> torch.Tensor:
    """bf16 [pairs, D]; of pairs whose expert is elsewhere nothing is written."""
    count, hidden, inner = w2.shape[0], w2.shape[1], h.q.shape[1]
    tile_d = c.tile_d if hidden % c.tile_d == 0 else 128
    packed = TensorDescriptor(w2, [count, hidden, inner // 2], [hidden * inner // 2, inner // 2, 1], [1, tile_d, 64])
    y = torch.empty(pairs, hidden, dtype=torch.bfloat16, device=w2.device)
    tiles = hidden // tile_d
    down[(groups.expert.shape[0] * tiles,)](
        packed, _words(w2_scale), h.q, h.scale, groups.expert, groups.pair, y, inner // 128, hidden, tiles,
        TILE_D=tile_d, BLOCK_N=c.block_n, TABLE=c.table, GROUPS=0 if c.whole_rows else 128 // c.tile_f, num_warps=c.warps, num_stages=c.stages,
    )
    return y
