#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From steps.py's csv: the Pareto plots, and ours over the host's at every point that both have.

    pareto.py STEPS.csv [PLOT.png]

Decode: tokens/s/GPU against tokens/s/user, a line a model and context, batches along it.  Prefill: tokens/s/GPU against
ms a step.  A point is the last good row of the file.  The host's is the fastest of its backends at that point, and the
table says which: ours must beat what a user can have, not what a bundle happened to lack.  All numbers are of the few
layers that steps.py runs; a whole model has five times as many.
"""

from __future__ import annotations

import argparse
import csv
import re
from dataclasses import dataclass
from pathlib import Path

DECODE, PREFILL = re.compile(r"decode-b(\d+)-c(\d+)$"), re.compile(r"prefill-q(\d+)-c(\d+)$")
# Issue goals, by the case they are about: how many times as fast.
GOALS = (("prefill-q32768", 1.5), ("decode-b8-", 1.3), ("decode-b64-", 1.3), ("decode-b256-", 1.2), ("kv-", 1.8))


@dataclass
class Point:
    """One case of one model: its row, tokens/s/GPU, and tokens/s/user (decode) or ms a step (prefill)."""

    row: dict
    throughput: float
    other: float


def read(path: Path) -> list[dict]:
    """Good rows; a later row of the same kind stands for an earlier one."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    keys = ("device", "impl", "humming", "backends", "drafts", "replay", "chunk", "case")
    return list({tuple(row[k] for k in keys): row for row in rows}.values())


def point(row: dict) -> Point | None:
    ms = float(row["median"])
    if found := DECODE.match(row["case"]):
        user = float(row["said_per_row"]) / ms * 1e3
        return Point(row, user * int(found[1]), user)
    if found := PREFILL.match(row["case"]):
        steps = -(-int(found[1]) // int(row["chunk"]))
        return Point(row, int(found[1]) / ms * 1e3, ms / steps)
    return None


def speed(row: dict) -> float:
    """Larger is better: tokens/GiB as they are, times inverted (decode with what each step says)."""
    value = float(row["median"])
    return value if row["unit"] == "tokens/GiB" else float(row["said_per_row"] or 1) / value


def compare(rows: list[dict]) -> list[dict]:
    """Ours over the best host row of the same device, drafts, replay, chunk and case."""
    best: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["unit"] not in ("ms", "tokens/GiB"):
            continue
        mine = best.setdefault(tuple(row[k] for k in ("device", "drafts", "replay", "chunk", "case")), {})
        if row["impl"] not in mine or speed(row) > speed(mine[row["impl"]]):
            mine[row["impl"]] = row
    table = []
    for (_, drafts, replay, _, case), pair in best.items():
        if set(pair) != {"host", "plugin"}:
            continue
        host, ours = pair["host"], pair["plugin"]
        # Spreads that overlap prove no order.
        clear = not (float(host["low"]) <= float(ours["high"]) and float(ours["low"]) <= float(host["high"]))
        table.append({
            "case": case, "drafts": drafts, "replay": replay, "host": host["median"], "ours": ours["median"], "unit": host["unit"],
            "times": speed(ours) / speed(host), "clear": clear, "goal": next((goal for start, goal in GOALS if case.startswith(start)), None),
            "host_backend": f"{host['backends']}, humming {host['humming']}", "same_day": host["date"] == ours["date"],
        })
    return table


def show(table: list[dict]) -> None:
    for line in table:
        goal = "" if line["goal"] is None else f"goal {line['goal']} {'met' if line['times'] >= line['goal'] else 'NOT met'}"
        notes = [goal, "" if line["clear"] else "within the spread", "" if line["times"] >= 1 else "SLOWER",
                 "" if line["same_day"] else "not the same day"]
        print(f"{line['case']:24s} drafts {line['drafts']}  host {line['host']:>9s}  ours {line['ours']:>9s} {line['unit']:10s} "
              f"{line['times']:.2f} times  [{line['host_backend']}]  {'; '.join(filter(None, notes))}")
    if any("absent" in line["host_backend"] for line in table):
        print("Where Humming is absent the host is not vLLM as released: it prefers Humming on SM90.")


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contexts = sorted({int(DECODE.match(r["case"])[2]) for r in rows if DECODE.match(r["case"])})
    figure, axes = plt.subplots(1, len(contexts) + 1, figsize=(5 * (len(contexts) + 1), 4.4), layout="constrained", squeeze=False)
    styles = {"host": "tab:blue", "plugin": "tab:orange"}

    def lines(axis, pattern: re.Pattern, context: int | None) -> None:
        kinds: dict[tuple, list[Point]] = {}
        for row in rows:
            found = pattern.match(row["case"])
            if found and (context is None or int(found[2]) == context):
                kind = row["impl"], row["drafts"], row["backends"], row["humming"], row["replay"], found[2] if context is None else ""
                kinds.setdefault(kind, []).append(point(row))
        for (impl, drafts, backends, humming, _, old), points in sorted(kinds.items()):
            points.sort(key=lambda p: p.other)
            name = "plugin" if impl == "plugin" else f"vLLM ({'no Humming' if humming == 'absent' else backends})"
            name += f", DSpark-{drafts}" if drafts != "0" else ""
            name += f", {int(old) // 1024}K before" if old and int(old) else ""
            faint = humming == "absent" or (old and int(old))
            axis.plot([p.other for p in points], [p.throughput for p in points], "--" if drafts != "0" else "-", marker="o",
                      color=styles[impl], alpha=0.45 if faint else 1, label=name)
            for p in points:
                axis.annotate(pattern.match(p.row["case"])[1], (p.other, p.throughput), fontsize=7, textcoords="offset points", xytext=(4, 3))
        axis.grid(alpha=0.3)
        axis.set_ylabel("tokens/s/GPU")
        if kinds:
            axis.legend(fontsize=7)

    for axis, context in zip(axes[0], contexts, strict=False):
        lines(axis, DECODE, context)
        size = f"{context // 1024}K" if context >= 1024 else context
        axis.set(title=f"Decode, {size} context (batch at each point)", xlabel="tokens/s/user", xscale="log", yscale="log")
    lines(axes[0][-1], PREFILL, None)
    axes[0][-1].set(title="Prefill (new tokens at each point)", xlabel="ms a step")
    about = rows[-1]
    title = f"8 layers of released sizes, dummy weights. {about['device']}, vLLM {about['vllm']}, {about['date']}, {about['commit']}"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("png", type=Path, nargs="?")
    args = parser.parse_args()
    rows = read(args.csv)
    table = compare(rows)
    show(table)
    if not table:
        print("no case that both have")
    if args.png and rows:
        draw(rows, args.png)


if __name__ == "__main__":
    main()
