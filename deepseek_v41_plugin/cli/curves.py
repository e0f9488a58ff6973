# SPDX-License-Identifier: Apache-2.0
"""Curves between 0 and 1 over time: as a line of text, as SVG, as PNG."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
COLOURS = ("#1f77b4", "#d62728", "#7f7f7f", "#2ca02c")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 320, 48, 32, 16, 40  # of the SVG and its margins, px


def sparkline(values: np.ndarray, columns: int = 60) -> str:
    """One bar a value; of more than `columns` values, neighbours are averaged."""
    parts = np.array_split(np.asarray(values, float), min(columns, len(values)))
    return "".join(BARS[min(int(part.mean() * len(BARS)), len(BARS) - 1)] for part in parts)


def draw(path: Path, title: str, xlabel: str, curves: dict[str, np.ndarray]) -> None:
    """Write the curves, float [N] each, to a path that `check` has let through."""
    if path.suffix.lower() == ".svg":
        path.write_text(svg(title, xlabel, curves), encoding="utf-8")
    else:
        _png(path, title, xlabel, curves)


def check(path: Path) -> None:
    """Raises ValueError if `path` does not end in .svg, or .png with matplotlib there."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise ValueError(f"{path}: not an .svg or .png file. Choose one of these endings")
    if kind == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError(f"{path}: PNG needs matplotlib. Install it, or choose an .svg file") from None


def svg(title: str, xlabel: str, curves: dict[str, np.ndarray]) -> str:
    last = max(1, max(len(values) for values in curves.values()) - 1)

    def at(n: float, value: float) -> tuple[float, float]:
        return LEFT + n / last * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(xlabel)}</text>',
    ]
    for value in (0, 0.25, 0.5, 0.75, 1):
        (x, y), (end, _) = at(0, value), at(last, value)
        out.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#ddd"/><text x="{x - 6}" y="{y + 4}" text-anchor="end">{value}</text>')
    for n in sorted({0, last // 2, last}):
        x, y = at(n, 0)
        out.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{n}</text>')
    for i, (name, values) in enumerate(curves.items()):
        colour, y = COLOURS[i % len(COLOURS)], HEIGHT - BOTTOM - 16 * (len(curves) - i) + 4
        points = " ".join("{:.1f},{:.1f}".format(*at(n, float(v))) for n, v in enumerate(values))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        out.append(f'<text x="{LEFT + 8}" y="{y}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>\n"])


def _png(path: Path, title: str, xlabel: str, curves: dict[str, np.ndarray]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for i, (name, values) in enumerate(curves.items()):
        axes.plot(values, color=COLOURS[i % len(COLOURS)], label=name)
    axes.set(title=title, xlabel=xlabel, ylim=(0, 1.02))
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)
    plt.close(figure)
