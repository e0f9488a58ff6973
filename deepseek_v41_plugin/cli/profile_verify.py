# SPDX-License-Identifier: Apache-2.0
"""`dsv41 profile-verify MODEL -o FILE`: what a step costs here, for scheduled verification."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np

from ..verification import Calibration, Curve, Profile, StepCosts, slowest_costs
from ..verification.calibration import ENOUGH, cross_entropy, fit

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the drafts, verified in turn
RELEASED_BLOCK = 5
USELESS = 0.01  # share of accepted drafts below which there is nothing to calibrate


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "profile-verify", help="measure what verifying drafts costs on this machine",
        description="Starts the engine as it will be served, sweeps batch sizes and numbers of verified drafts, and "
        "writes the costs for additional_config.dsv41.verify_profile. Close other programs that use the devices.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint's folder or name")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the profile")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="arguments of the engine, as served")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="largest batch (default 64)")
    add("--drafts", type=int, metavar="K", help="num_speculative_tokens (default: the model's block)")
    add("--context", type=int, default=1024, metavar="N", help="random tokens before each request (default 1024)")
    add("--prompts", type=Path, metavar="FILE", help="text prompts, one a line, instead: needed to calibrate")
    add("--quick", action="store_true", help="few sizes and steps")
    add("--log", type=Path, metavar="LOG.npz", help="confidences and accepts, for bench/simulate_verification.py")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    check(args)
    llm = start(args)
    from ..vllm.profiles import identity

    config = llm.llm_engine.vllm_config
    k = config.num_speculative_tokens
    ranks, steps = sweep(llm, args, k, steps=4 if args.quick else 16)
    costs = slowest_costs([costs_of(rank) for rank in ranks])
    logits, verified, accepted = blocks_of(ranks[0]["blocks"])
    calibration, remark = calibrate(logits, verified, accepted)
    Profile(identity(config), costs, calibration).save(args.output)
    if args.log:
        save_log(args.log, ranks[0]["blocks"], k)
    print(summary(costs, ranks, k, remark))
    print(f"{args.output}: written after {steps} steps")
    return 0


def check(args: argparse.Namespace) -> None:
    """Stop before the engine starts and minutes are spent."""
    for name in ("max_num_seqs", "context", "drafts"):
        value = getattr(args, name)
        if value is not None and value < 1:
            stop(f"--{name.replace('_', '-')}: {value} is not at least 1")
    additional = args.engine_args.get("additional_config", {}) if isinstance(args.engine_args, dict) else None
    if not isinstance(additional, dict) or not isinstance(additional.get("dsv41", {}), dict):
        stop("--engine-args: not a JSON object of options (additional_config and its dsv41 are objects too)")
    for name, path in (("--output", args.output), ("--log", args.log)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            stop(f"{name}: {path} cannot be written. Name a file in a folder that exists")
    if args.prompts is not None:
        try:
            args.prompts = [line for line in args.prompts.read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            stop(f"--prompts: {error}")
        if not args.prompts:
            stop("--prompts: no prompt. Write one a line")
    if args.model.startswith(("/", ".", "~")) and not Path(args.model, "config.json").is_file():
        stop(f"MODEL: {args.model} has no config.json. Name a checkpoint's folder")


def stop(text: str) -> None:
    raise SystemExit(f"dsv41 profile-verify: {text}")


def start(args: argparse.Namespace):
    """The engine, in this process where one rank suffices, its worker extended to measure."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    from ..vllm.profiles import MEASURING

    given = dict(args.engine_args)
    drafts = args.drafts or block_of(Path(args.model))
    speculative = {"method": "dspark", "enable_adaptive_verification": True, "num_speculative_tokens": drafts}
    given["speculative_config"] = speculative | given.pop("speculative_config", {})
    additional = given.get("additional_config", {})
    options = {n: v for n, v in additional.get("dsv41", {}).items() if n != "verify_profile"}
    return LLM(model=args.model, **given | {
        "max_num_seqs": args.max_num_seqs, "worker_extension_cls": MEASURING, "async_scheduling": False,
        "additional_config": additional | {"dsv41": options},
    })


def block_of(folder: Path) -> int:
    """Tokens of a draft block: what config.json says, or the released model's."""
    config = folder / "config.json"
    if not config.exists():
        return RELEASED_BLOCK
    block = json.loads(config.read_text()).get("text_config", {}).get("dspark_block_size")
    return block or stop(f"MODEL: {folder} has no draft stages")


def sweep(llm, args: argparse.Namespace, k: int, steps: int) -> tuple[list[dict], int]:
    """(what each rank measured, steps made): all batch sizes, `steps` steps at each share of drafts."""
    limit = llm.llm_engine.vllm_config.model_config.max_model_len - steps * len(SHARES) * (k + 1) - 1
    if limit < 1:
        stop("max_model_len leaves no room for a prompt. Raise it, or use --quick")
    prompts, rng = None, random.Random(0)
    if args.prompts:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.encode(line) for line in args.prompts]
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    total, made = [], 0
    for size in batch_sizes(args.max_num_seqs, args.quick):
        ids = []
        for i in range(size):
            prompt = prompts[i % len(prompts)] if prompts else rng.choices(range(vocabulary), k=args.context)
            ids.append(f"{size}-{i}")
            submit(llm, ids[-1], prompt[:limit])
        waiting = set(ids)
        while waiting:  # until all decode
            waiting -= {out.request_id for out in llm.llm_engine.step() if out.outputs[0].token_ids}
        llm.collective_rpc("dsv41_measured")
        for share in SHARES:
            llm.collective_rpc("dsv41_force", args=(round(share * size * k),))
            for _ in range(steps):
                llm.llm_engine.step()
                made += 1
        llm.collective_rpc("dsv41_force", args=(None,))
        found = llm.collective_rpc("dsv41_measured")
        total = [{n: a[n] + b[n] for n in a} for a, b in zip(total, found, strict=True)] if total else found
        llm.llm_engine.abort_request(ids)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    return total, made


def submit(llm, request_id: str, prompt: list[int]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)


def batch_sizes(most: int, quick: bool) -> list[int]:
    """1, 2, 4, ... and `most`; quick: 1, a middle one and `most`."""
    sizes = sorted({2**i for i in range(most.bit_length())} | {most})
    return sorted({1, sizes[len(sizes) // 2], most}) if quick else sizes


def costs_of(rank: dict[str, list]) -> StepCosts:
    """Medians of one rank's measurements, repaired to rise."""
    trim = float(np.median(rank["trim"])) if rank["trim"] else 0.0
    return StepCosts(Curve.fit((rows, ms) for rows, _, ms in rank["verify"]), Curve.fit(rank["draft"]), trim)


def blocks_of(blocks: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits [n, k], verified [n], accepted [n]) of all draft blocks of which something was verified."""
    columns = [np.concatenate([np.asarray(block[i]) for block in blocks]) for i in (1, 2, 3)]
    kept = columns[1] > 0
    confidence, verified, accepted = (column[kept] for column in columns)
    return logit(confidence), verified, accepted


def logit(p: np.ndarray) -> np.ndarray:
    """Infinite where float32 has rounded a probability to 0 or 1; `fit` leaves those out."""
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log1p(-np.asarray(p))


def calibrate(logits: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> tuple[Calibration | None, str]:
    """(temperatures or None, what to say about them)."""
    share = accepted.sum() / max(verified.sum(), 1)
    said = f"calibration  {accepted.sum()} of {verified.sum()} verified drafts accepted"
    if share < USELESS:
        return None, f"{said}: none made. Random weights or random prompts accept nothing; give --prompts"
    calibration = fit(logits, verified, accepted)
    few = [i for i, count in enumerate(calibration.count) if count < ENOUGH]
    if 0 in few:
        return None, f"{said}: none made, {calibration.count[0]} observations are fewer than {ENOUGH}"
    if few:
        said += f"; positions {few} have fewer than {ENOUGH} observations and use the common temperature"
    finite = np.isfinite(logits).all(1)
    before, after = (
        cross_entropy(logits[finite], verified[finite], accepted[finite], by)
        for by in (Calibration.none(logits.shape[1]), calibration)
    )
    temperatures = ", ".join(f"{t:.2f}" for t in calibration.temperature)
    return calibration, f"{said}; temperatures {temperatures}; cross entropy {before:.4f} -> {after:.4f} nats"


def save_log(path: Path, blocks: list, k: int) -> None:
    """logits [steps, requests, k], accepted [steps, requests]: the steps of the largest batch that verified all."""
    full = [block for block in blocks if block[2] and min(block[2]) == k]
    most = max((len(block[0]) for block in full), default=0)
    full = [block for block in full if len(block[0]) == most]
    order = [np.argsort(block[0]) for block in full]
    np.savez(
        path,
        logits=np.array([logit(np.asarray(block[1])[at]) for block, at in zip(full, order, strict=True)]),
        accepted=np.array([np.asarray(block[3])[at] for block, at in zip(full, order, strict=True)]),
    )


def summary(costs: StepCosts, ranks: list[dict], k: int, remark: str) -> str:
    """The costs as people read them."""
    lines = [f"{'requests':>8s} {'drafts':>7s} {'rows':>6s} {'target ms':>10s} {'draft ms':>9s}"]
    for requests in sorted({requests for _, requests, _ in ranks[0]["verify"]}):
        for share in (0.0, 1.0):
            drafts = round(share * requests * k)
            rows = requests + drafts
            draft = f"{costs.draft_ms(requests):9.2f}" if share else ""
            lines.append(f"{requests:8d} {drafts:7d} {rows:6d} {float(costs.verify.at(rows)):10.2f} {draft}")
    lines.append(f"trimming a batch: {costs.trim_ms:.3f} ms")
    lines.append(remark)
    return "\n".join(lines)
