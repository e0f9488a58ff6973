# SPDX-License-Identifier: Apache-2.0
"""`dsv41 eplb-sim LOADS`: what an expert placement policy would have made of recorded loads."""

from __future__ import annotations

import argparse
import csv
import sys
from functools import partial
from pathlib import Path

import numpy as np

from ..eplb import simulate
from ..eplb.fewest_moves import rebalance
from .curves import check, draw, sparkline

NAME = "dsv41 eplb-sim"
EXPERT_BYTES = 3 * 2304 * 5120 // 2 * 17 // 16  # w1, w2, w3 in 4 bits, and a byte of scale for 32 of them
DEFAULTS = {"ranks": 8, "redundant": 0, "expert_bytes": EXPERT_BYTES}
COLUMNS = ("curve", "window", "balancedness_mean", "balancedness_worst", "slots_moved", "experts_moved")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "eplb-sim", help="replay recorded expert loads through a placement policy",
        description="Places experts by each window of LOADS and judges the placement by the next window. Prints and draws "
        "balancedness (mean / largest load of a rank) over time, beside that without rebalancing and that of the same number of "
        "tokens routed evenly at random, also without rebalancing. Ranks, redundant experts and an expert's bytes are the recorded ones "
        "if not given.",
    )
    add = parser.add_argument
    add("loads", type=Path, metavar="LOADS", help="an .npz file with `loads`, int [windows, layers, experts]")
    add("--ranks", type=_positive, metavar="R", help="expert parallel ranks (default as recorded, else 8)")
    add("--redundant", type=_natural, metavar="N", help="redundant experts (default as recorded, else 0)")
    add("--policy", choices=list(simulate.POLICIES), default="fewest_moves", help="default %(default)s")
    add("--slack", type=float, metavar="X", help="fewest_moves: balancedness it may give up to move less (default 0)")
    add("--seed", type=_natural, default=0, metavar="N", help="of the even routing (default 0)")
    add("--expert-bytes", type=_natural, metavar="N", help=f"of an expert's weights in a layer (default as recorded, else V4.1's, {EXPERT_BYTES})")
    add("--csv", type=Path, metavar="FILE", help=f"a row a curve and window: {', '.join(COLUMNS)}")
    add("--plot", type=Path, metavar="FILE", help="an .svg, or a .png, which needs matplotlib")
    parser.set_defaults(run=run)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not _natural(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """0, or 1 after an error message."""
    try:
        check_arguments(args)
        recording = simulate.load(args.loads)
        sizes, said = sizes_of(recording, args)
        found = curves_of(recording.loads, sizes["ranks"], sizes["redundant"], args)
        windows, layers, experts = recording.loads.shape
        placed = f"{experts} + {sizes['redundant']} experts on {sizes['ranks']} ranks"
        print(f"{recording.name or args.loads.name}: {windows} windows, {layers} layers, {placed}")
        print(said)
        print(table(found, sizes["expert_bytes"]))
        if args.csv:
            write_csv(args.csv, found)
        if args.plot:
            title = f"Balancedness, mean of {layers} layers: {placed}"
            draw(args.plot, title, "window", {name: curve.balancedness.mean(1) for name, curve in found.items()})
    except (ValueError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ValueError for what would be found out, or never noticed, only behind a long replay."""
    if args.slack is not None and args.policy != "fewest_moves":
        raise ValueError(f"--slack: policy {args.policy} does not take it. Leave it out, or choose --policy fewest_moves")
    for path in filter(None, (args.csv, args.plot)):
        if path.is_dir():
            raise ValueError(f"{path}: a folder. Name a file in it")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}. Make it, or name another")
    if args.plot:
        check(args.plot)


def sizes_of(recording: simulate.Recording, args: argparse.Namespace) -> tuple[dict[str, int], str]:
    """The fields of DEFAULTS: as given, else as recorded, else the default; and a line that says which."""
    sizes, said = {}, []
    for field, default in DEFAULTS.items():
        choices = (getattr(args, field), "given"), (getattr(recording, field), "recorded"), (default, "default")
        sizes[field], source = next(choice for choice in choices if choice[0] is not None)
        said.append(f"{field.replace('_', ' ')} {sizes[field]} ({source})")
    return sizes, ", ".join(said)


def curves_of(loads: np.ndarray, ranks: int, redundant: int, args: argparse.Namespace) -> dict[str, simulate.Replay]:
    """The policy's curve, the one without rebalancing, and that of even routing."""
    even = simulate.uniform(loads, np.random.default_rng(args.seed))
    policies = simulate.POLICIES | {"fewest_moves": partial(rebalance, slack=args.slack or 0.0)}
    given = {args.policy: (loads, args.policy), "none": (loads, "none"), "uniform routing": (even, "none")}
    return {name: simulate.replay(of, ranks, redundant, policies[policy]) for name, (of, policy) in given.items()}


def table(found: dict[str, simulate.Replay], expert_bytes: int) -> str:
    """A line a curve: means over windows, what was moved, and the curve itself, its bars from 0 to 1."""
    lines = [f"{'':<15s} {'mean':>6s} {'worst layer':>11s} {'slots moved':>11s} {'experts moved':>13s} {'GB moved':>9s}  over time (0 to 1)"]
    for name, curve in found.items():
        by_window = curve.balancedness.mean(1)
        sent = int(curve.crossed.sum())
        balance = f"{by_window.mean():6.3f} {curve.balancedness.min(1).mean():11.3f}"
        lines.append(f"{name:<15s} {balance} {curve.moved.sum():11d} {sent:13d} {sent * expert_bytes / 1e9:9.2f}  {sparkline(by_window)}")
    return "\n".join(lines)


def write_csv(path: Path, found: dict[str, simulate.Replay]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, curve in found.items():
            for n, (row, slots, sent) in enumerate(zip(curve.balancedness, curve.moved, curve.crossed, strict=True)):
                writer.writerow((name, n, f"{row.mean():.6f}", f"{row.min():.6f}", slots.sum(), sent.sum()))
