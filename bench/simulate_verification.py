#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fixed 5 drafts against scheduled verification, simulated over a cost curve.

    simulate_verification.py [--costs PROFILE] [--recorded LOG.npz] [--csv FILE] [--plot FILE.png]

Prints, for each number of sequences a rank: throughput against fixed verification of all drafts,
verified drafts, accepted length (tokens a step, the bonus token included), the mean budget.

The published table whose shape this reproduces (DeepInfer, 16/32/48/60/72/96 sequences a rank):
-1.5, +1.6, +3.6, +5.4, +6.7, +11.0 % throughput, about 30 % fewer verified drafts, accepted length
3.29 -> 3.20.  The hardware's curve and the confidences behind it are not published.  So:

Fitted to the table (the default curve and workload; nothing here is a measurement):
  * the target's cost: linear in rows, steeper from `KNEE` rows on (arithmetic begins to bind);
  * OVERHEAD ms that scheduling adds to every step, trimmed or not: what makes 16 sequences lose;
  * the mean and spread of the confidences: 3.29 with all drafts, about 3.2 with 30 % fewer.
Not fitted: which drafts are verified.  That is the package's own policy, with its own code.

Assumed:
  * a closed batch of decoding sequences, no prefill, full graphs of any size, ranks independent;
  * logit of draft i = mean + a request's difficulty (kept from step to step with correlation 0.8)
    + noise of the draft; accepted with probability sigmoid(logit), all before it accepted: the
    confidences are calibrated;
  * the budget sees confidences `--age` steps old (2: asynchronous scheduling), the lengths fresh ones;
  * what is not verified would have been accepted as drawn or recorded; the next block is drawn or
    recorded regardless of how many tokens this one gave.
Both arms see the same draws.  `bypass`: the same policy, which pays the overhead only in steps that
it trims and counts it in its choice.  `none`: no drafts at all, the draft pass left out.

LOG.npz: logits float [steps, requests, k] and accepted int [steps, requests], recorded with all k
drafts verified; temperatures of PROFILE are applied.  Requests are drawn from it with replacement.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from datetime import date
from pathlib import Path

import numpy as np
import torch

from deepseek_v41_plugin.kernels import verification
from deepseek_v41_plugin.verification import Curve, Profile, StepCosts, plan

SIZES = (16, 32, 48, 60, 72, 96)
PUBLISHED = (-1.5, 1.6, 3.6, 5.4, 6.7, 11.0)
K = 5
FLOOR, SLOPE, KNEE, STEEP = 12.0, 0.021, 400, 0.024  # ms, ms a row, rows, ms a row
DRAFT = (1.0, 0.008)  # ms, ms a request
OVERHEAD = 0.35  # ms
MEAN, DIFFICULTY, NOISE, KEPT = 1.45, 1.5, 1.5, 0.8


def default_costs() -> StepCosts:
    knee = FLOOR + SLOPE * KNEE
    verify = Curve(((1, FLOOR + SLOPE), (KNEE, knee), (1000, knee + STEEP * (1000 - KNEE))))
    return StepCosts(verify, Curve(((1, DRAFT[0]), (1000, DRAFT[0] + 1000 * DRAFT[1]))))


def synthetic(rng: np.random.Generator, steps: int, requests: int) -> tuple[np.ndarray, np.ndarray]:
    """(confidence [steps, requests, K], accepted [steps, requests] if all drafts are verified)."""
    difficulty = np.empty((steps, requests, 1))
    difficulty[0] = rng.standard_normal((requests, 1))
    for t in range(1, steps):
        difficulty[t] = KEPT * difficulty[t - 1] + np.sqrt(1 - KEPT**2) * rng.standard_normal((requests, 1))
    logits = MEAN + DIFFICULTY * difficulty + NOISE * rng.standard_normal((steps, requests, K))
    confidence = 1 / (1 + np.exp(-logits))
    return confidence, np.cumprod(rng.random(confidence.shape) < confidence, axis=2).sum(2)


def recorded(path: Path, temperature: np.ndarray | float, rng, requests: int) -> tuple[np.ndarray, np.ndarray]:
    """As `synthetic`, from a log: `requests` of its columns, each started at a random step."""
    log = np.load(path)
    confidence, accepted = 1 / (1 + np.exp(-log["logits"] / temperature)), log["accepted"]
    steps, columns = accepted.shape
    at = (np.arange(steps)[:, None] + rng.integers(0, steps, requests)) % steps
    column = rng.integers(0, columns, requests)
    return confidence[at, column], accepted[at, column]


def scheduled(costs: StepCosts, confidence: np.ndarray, accepted: np.ndarray, age: int, overhead: float) -> dict:
    """Tokens, ms and verified drafts of the policy over all steps; `overhead` ms are added to each."""
    steps, requests, k = confidence.shape
    prior = np.tile(confidence.mean((0, 1)), (requests, 1))
    full = np.full(requests, k)
    ready, tokens, ms, verified = full, 0, 0.0, 0
    for t in range(steps):
        known = confidence[t - age] if t >= age else prior
        chosen = plan(costs, known, ready, potential=full, base_rows=requests, sampling=requests)
        fresh = torch.from_numpy(confidence[t])
        lengths = verification.lengths(fresh, torch.from_numpy(ready), chosen.budget).numpy()
        tokens += requests + int(np.minimum(lengths, accepted[t]).sum())
        verified += int(lengths.sum())
        ms += chosen.cost_ms + overhead
        ready = full if chosen.draft else np.zeros_like(full)
    return {"tokens": tokens, "ms": ms, "verified": verified}


def simulate(costs: StepCosts, confidence: np.ndarray, accepted: np.ndarray, age: int, overhead: float) -> dict:
    """The numbers of one batch size."""
    steps, requests, k = confidence.shape
    draft_ms = costs.draft_ms(requests)
    fixed_tokens = steps * requests + int(accepted.sum())
    fixed_rate = fixed_tokens / (steps * (float(costs.verify.at(requests * (k + 1))) + draft_ms))
    ours = scheduled(costs, confidence, accepted, age, overhead)
    bypass = scheduled(StepCosts(costs.verify, costs.draft, overhead), confidence, accepted, age, 0.0)
    percent = {
        "scheduled_percent": ours["tokens"] / ours["ms"] / fixed_rate,
        "bypass_percent": bypass["tokens"] / bypass["ms"] / fixed_rate,
        "none_percent": requests / float(costs.verify.at(requests)) / fixed_rate,
    }
    drafts = steps * requests * k
    return {
        "sequences": requests,
        **{name: 100 * (ratio - 1) for name, ratio in percent.items()},
        "fewer_verified_percent": 100 * (1 - ours["verified"] / drafts),
        "length_fixed": fixed_tokens / (steps * requests),
        "length_scheduled": ours["tokens"] / (steps * requests),
        "budget": ours["verified"] / steps,
        "rows_fixed": requests * (k + 1),
        "fixed_tokens_per_s": 1000 * fixed_rate,
    }


def plot(rows: list[dict], path: Path, published: bool) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    at = [r["sequences"] for r in rows]
    if published:
        left.plot(SIZES, PUBLISHED, "k--", marker="s", label="DeepInfer's table")
    left.plot(at, [r["scheduled_percent"] for r in rows], marker="o", label="scheduled, overhead in every step")
    left.plot(at, [r["bypass_percent"] for r in rows], marker="^", label="scheduled, overhead when trimmed")
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(xlabel="sequences a rank", ylabel=f"throughput against fixed {K} (%)", title="Throughput (simulated)")
    left.legend()
    right.plot(at, [r["fewer_verified_percent"] for r in rows], marker="o", color="tab:red")
    right.set(xlabel="sequences a rank", ylim=(0, None), title="Verified drafts and accepted length (simulated)")
    right.set_ylabel("fewer verified drafts (%)", color="tab:red")
    length = right.twinx()
    length.plot(at, [r["length_fixed"] for r in rows], "--", color="tab:blue", label="fixed")
    length.plot(at, [r["length_scheduled"] for r in rows], marker="o", color="tab:blue", label="scheduled")
    length.set_ylim(3.0, 3.4)
    length.set_ylabel("accepted length (tokens a step)", color="tab:blue")
    length.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--costs", type=Path, help="a profile of `dsv41 profile-verify`; default: the fitted curve")
    parser.add_argument("--recorded", type=Path, help="recorded logits and accepts; default: synthetic")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--steps", type=int, default=1500, help="of a synthetic batch")
    parser.add_argument("--age", type=int, default=2, help="steps by which the budget's confidences are old")
    parser.add_argument("--overhead", type=float, help="ms; default: the profile's trim_ms, or the fitted value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    temperature: np.ndarray | float = 1.0
    costs, overhead = default_costs(), OVERHEAD
    if args.costs:
        profile = Profile.load(args.costs)
        costs, overhead = StepCosts(profile.costs.verify, profile.costs.draft), profile.costs.trim_ms
        if profile.calibration is not None:
            temperature = np.array(profile.calibration.temperature)
    overhead = overhead if args.overhead is None else args.overhead
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows = []
    for size in args.sizes:
        rng = np.random.default_rng((args.seed, size))
        if args.recorded:
            confidence, accepted = recorded(args.recorded, temperature, rng, size)
        else:
            confidence, accepted = synthetic(rng, args.steps, size)
        rows.append(simulate(costs, confidence, accepted, args.age, overhead))
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    if args.csv:
        about = {
            "date": date.today(), "commit": commit, "costs": args.costs or "fitted",
            "confidences": args.recorded or "synthetic", "age": args.age, "overhead_ms": overhead, "seed": args.seed,
        }
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*about, *rows[0]])
            writer.writeheader()
            for row in rows:
                writer.writerow(about | {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})
    if args.plot:
        plot(rows, args.plot, not args.costs and not args.recorded)


if __name__ == "__main__":
    main()
