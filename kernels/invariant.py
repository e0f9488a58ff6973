# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant arithmetic: a row's bits do not depend on the rows beside it.

A library picks its algorithm by the shape of what it is given, and a vector unit treats the end of a
tensor otherwise than its middle.  So, while the switch is on, whatever could notice works on tiles: a
fixed number of rows, the last tile filled up with zeros, each tile a fresh contiguous tensor.  Then only
a row's place in its tile is left to matter, and it does not:

- On a GPU a tile's rows lie in one tile of any matrix product, and are computed alike.
- On the CPU 16 rows of 4 columns or more are whole vectors.  Matrix products over rows, whose edges may be
  computed otherwise, and wide exponentials, which threads may cut anywhere, go row by row (`apart`).

Exact or correctly rounded element by element (sums of two, products, square roots, conversions): no tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import torch

TILE_ROWS = 16

_on = False


def enabled() -> bool:
    """Whether the switch is on."""
    return _on


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """The switch, of the whole process, set for the length of a block."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def over_rows(fn: Callable, *rows: torch.Tensor, apart: bool = False, most: int | None = None):
    """fn(*rows) for tensors [T, ...] of which fn treats each row by itself; a tensor or a tuple of them.

    On: tile by tile; `apart`: row by row on the CPU.  Off: at once, or `most` rows at a time.
    """
    count = rows[0].shape[0]
    if _on:
        size = 1 if apart and rows[0].device.type == "cpu" else TILE_ROWS
    elif most is None or count <= most:
        return fn(*rows)
    else:
        size = most
    pieces = zip(*(x.split(size) for x in rows), strict=True)
    parts = [fn(*(_tile(x, size) for x in piece)) if _on else fn(*piece) for piece in pieces]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(part)[:count] for part in zip(*parts, strict=True))
    return torch.cat(parts)[:count]


def row_op(rows: int, apart: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: a function whose first `rows` arguments are tensors [T, ...], as `over_rows` wants it."""

    def decorate(fn: Callable) -> Callable:
        @wraps(fn)
        def tiled(*args, **kwargs):
            if not _on:
                return fn(*args, **kwargs)
            return over_rows(lambda *tiles: fn(*tiles, *args[rows:], **kwargs), *args[:rows], apart=apart)

        return tiled

    return decorate


@row_op(1, apart=True)
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T: x [T, i], weight [o, i] -> [T, o] in their dtype."""
    return torch.nn.functional.linear(x, weight)


def _tile(x: torch.Tensor, size: int) -> torch.Tensor:
    if x.shape[0] == size:
        return x.clone(memory_format=torch.contiguous_format)
    tile = x.new_zeros(size, *x.shape[1:])
    tile[: x.shape[0]] = x
    return tile
