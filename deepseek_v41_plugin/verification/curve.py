# SPDX-License-Identifier: Apache-2.0
"""A measured cost as a function of one size: piecewise linear, never falling, padded where graphs pad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


LARGEST = 1 << 31  # rows or requests


class CurveError(ValueError):
    """Points that are no cost curve."""


def repair(cost: Sequence[float], weight: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `cost` in weighted least squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # [mean, weight, length]
    for value, mass in zip(cost, weight, strict=True):
        pools.append([float(value), float(mass), 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, mass, length = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * mass) / (last[1] + mass)
            last[1] += mass
            last[2] += length
    return [mean for mean, _, length in pools for _ in range(int(length))]


@dataclass(frozen=True)
class Curve:
    """Cost in ms at sizes (rows or requests).

    points: (size >= 1, ms > 0), sizes ascending, ms non-decreasing; linear between them, constant
    below the first.  Beyond the last the steeper of the last and of the mean slope goes on, so that
    a flat end of the measurement is not taken for free rows.
    pads: captured graph sizes, ascending.  A size up to the last pad costs what the next pad costs.
    Sizes above it run without a graph: only points above it count there, when there are any.
    """

    points: tuple[tuple[int, float], ...]
    pads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.points:
            raise CurveError("points: empty; measure at least one size")
        for size, ms in self.points:
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < LARGEST:
                raise CurveError(f"points: size {size!r} is not a positive integer")
            if isinstance(ms, bool) or not isinstance(ms, (int, float)) or not 0 < ms < float("inf"):
                raise CurveError(f"points: {ms!r} ms at size {size} is not a positive finite number")
        for (a, cost_a), (b, cost_b) in pairwise(self.points):
            if a >= b:
                raise CurveError(f"points: size {b} follows {a}; sizes must ascend")
            if cost_a > cost_b:
                raise CurveError(f"points: {cost_b} ms at size {b} after {cost_a} ms at {a}; use Curve.fit to repair")
        if any(isinstance(p, bool) or not isinstance(p, int) or not 1 <= p < LARGEST for p in self.pads):
            raise CurveError(f"pads: {list(self.pads)} holds something else than positive integers")
        if any(a >= b for a, b in pairwise(self.pads)):
            raise CurveError(f"pads: {list(self.pads)} must ascend")

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, float]], pads: Iterable[int] = ()) -> Curve:
        """The curve of measured (size, ms) pairs: median of each size, then `repair`, weighted by counts.

        The result does not depend on the order of the samples.
        """
        by_size: dict[int, list[float]] = {}
        for size, ms in samples:
            by_size.setdefault(int(size), []).append(float(ms))
        sizes = sorted(by_size)
        cost = repair([float(np.median(by_size[s])) for s in sizes], [len(by_size[s]) for s in sizes])
        return cls(tuple(zip(sizes, cost, strict=True)), tuple(sorted(set(map(int, pads)))))

    def at(self, sizes: np.ndarray | int) -> np.ndarray:
        """ms float64 at integer sizes >= 0 of any shape."""
        sizes = np.asarray(sizes)
        x, y = np.asarray(self.points, dtype=np.float64).T
        inside = np.interp(sizes, x, y) + self._tail() * np.maximum(sizes - x[-1], 0)
        if not self.pads:
            return inside
        pads = np.asarray(self.pads)
        last = pads[-1]
        padded = pads[np.minimum(np.searchsorted(pads, sizes), len(pads) - 1)]
        floor = np.interp(padded, x, y) + self._tail() * np.maximum(padded - x[-1], 0)
        if (x > last).any():
            inside = np.maximum(inside, np.interp(sizes, x[x > last], y[x > last]))
        return np.where(sizes <= last, floor, inside)

    def _tail(self) -> float:
        """ms a unit of size beyond the last point."""
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        if x0 == x1:
            return y1 / x1
        (x, y) = self.points[-2]
        return max((y1 - y) / (x1 - x), (y1 - y0) / (x1 - x0))


def slowest(curves: Sequence[Curve]) -> Curve:
    """The pointwise maximum at all knots of `curves`: what a group in lockstep pays.

    Pads are united, which is exact where all ranks captured the same sizes.
    """
    pads = tuple(sorted({p for c in curves for p in c.pads}))
    sizes = np.asarray(sorted({s for c in curves for s, _ in c.points} | set(pads)))
    cost = np.maximum.accumulate(np.max([c.at(sizes) for c in curves], axis=0))
    return Curve(tuple((int(s), float(ms)) for s, ms in zip(sizes, cost, strict=True)), pads)
