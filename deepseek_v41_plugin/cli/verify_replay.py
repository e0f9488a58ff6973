# SPDX-License-Identifier: Apache-2.0
"""``dsv41 verify-replay MODEL``: the modes of SWA bounded replay against each other."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config import ModelConfig
from ..replay import KINDS, MODES, Policy, describe, first_difference, random_batches
from . import replay_engines as engines
from .replay_step import difference

NAME = "dsv41 verify-replay"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Add ``verify-replay`` to an argparse subparsers object; its ``run`` default is ``run``."""
    parser = subparsers.add_parser(
        "verify-replay", help="compare the modes of SWA bounded replay: metadata, and logprobs of real engines",
        description="Level 1 compares rows, positions, key ranges and slots of the modes mask and compact over random "
        "batches; it counts what one layer of each kind does. Level 2 asks real engines in the modes off, mask and compact, and says how far the "
        "approximation moves their logprobs. Exit code 1 on a difference at level 1, or one over --bound.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a checkpoint's folder; level 1 reads config.json only")
    parser.add_argument("--level", choices=("1", "2", "both"), default="1", help="default 1")
    parser.add_argument("--keep-tokens", type=int, default=Policy.keep_tokens, metavar="N", help="prompt tokens after the cut (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of batches and prompts (default 0)")
    parser.add_argument("--batches", type=_positive, default=200, metavar="N", help="level 1: how many (default 200)")
    parser.add_argument("--drafts", type=int, metavar="N", help="level 1: drafts a step (default: the checkpoint's)")
    parser.add_argument("--prompts", type=Path, metavar="FILE",
                        help="level 2: a prompt a line, text or a JSON list of token ids (default: random ids)")
    parser.add_argument("--tokens", type=_positive, default=16, metavar="N", help="level 2: of each answer (default 16)")
    parser.add_argument("--engine-args", type=_mapping, default={}, metavar="JSON", help="level 2: more options of vllm.LLM")
    parser.add_argument("--bound", type=float, metavar="X",
                        help="level 2: fail if a logprob of mask and compact differs by more (default: only report)")
    parser.set_defaults(run=run)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _mapping(text: str) -> dict:
    try:
        value = json.loads(text)
        inner = value.get("additional_config", {})
        sound = isinstance(inner.get("dsv41", {}), dict)
    except (json.JSONDecodeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise argparse.ArgumentTypeError("not a JSON object of options (additional_config and its dsv41 are objects too)")
    return value


def run(args: argparse.Namespace) -> int:
    """0, or 1 after a difference or an error message."""
    try:
        cfg = ModelConfig.from_hf(json.loads((args.model / "config.json").read_text(encoding="utf-8")))
        if cfg.last_kv_source is None:
            raise ValueError(f"{args.model}: no KV source, so no layer to cut at. Nothing is replayed after one")
        drafts = cfg.dspark_block_size if args.drafts is None else args.drafts
        policy = Policy(cfg.sliding_window, "compact", args.keep_tokens, drafts)
        good = args.level == "2" or compare_metadata(cfg, policy, args.batches, args.seed)
        return int(not (good and (args.level == "1" or compare_engines(cfg, args))))
    except (ValueError, OSError, RecursionError, engines.EngineError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1


def compare_metadata(cfg: ModelConfig, policy: Policy, count: int, seed: int) -> bool:
    """Level 1: the plan's metadata by themselves, and the model's step against them.

    Prints counts by kind of layer, and the first difference if there is one.
    """
    cut, last = cfg.last_kv_source, cfg.num_hidden_layers - 1
    before, later = f"0..{cut - 1}" if cut else "none", f"{cut + 1}..{last}" if cut < last else "none"
    names = {"encoder": before, "cut": f"{cut} (cut)", "later": later + (" and draft" if policy.drafts else "")}
    print(f"level 1: {count} batches, seed {seed}, window {policy.window}, keep_tokens {policy.keep_tokens}, drafts {policy.drafts}")
    totals = {(kind, mode): np.zeros(4, dtype=np.int64) for kind in KINDS for mode in ("mask", "compact")}
    for number, batch in enumerate(random_batches(np.random.default_rng(seed), policy, count)):
        asked = [replace(policy, decoder=mode) for mode in MODES]
        if problem := first_difference(policy, batch) or next(filter(None, (difference(p, batch) for p in asked)), None):
            print(f"DIFFERENT in batch {number}: {problem}")
            return False
        for mode in ("mask", "compact"):
            for kind, layer in describe(replace(policy, decoder=mode), batch).items():
                keys = np.maximum(layer.key_high - layer.key_low + 1, 0).sum()
                written = [(slots >= 0).sum() for slots in (layer.window_slots, layer.compressed_slots)]
                totals[kind, mode] += (len(layer.rows), keys, *written)
    print(f"{'layers':18} {'mode':8} {'rows':>10} {'window keys':>12} {'window rows':>12} {'compressed':>12}")
    for (kind, mode), (rows, keys, window, compressed) in totals.items():
        print(f"{names[kind]:18} {mode:8} {rows:10} {keys:12} {window:12} {compressed:12}")
    print("equal")
    return True


def compare_engines(cfg: ModelConfig, args: argparse.Namespace) -> bool:
    """Level 2; prints a line for each pair of modes; False if mask and compact are further apart than the bound."""
    if args.prompts is not None:
        prompts = engines.read_prompts(args.prompts)
    else:
        longest = min(cfg.max_position_embeddings, args.engine_args.get("max_model_len") or cfg.max_position_embeddings)
        prompts = engines.random_prompts(np.random.default_rng(args.seed), cfg, args.keep_tokens, longest - args.tokens)
        if not prompts:
            raise ValueError(f"--tokens: {args.tokens} leave no room for a prompt in {longest}")
    print(f"level 2: {len(prompts)} prompts, {args.tokens} tokens each, greedy, keep_tokens {args.keep_tokens}", flush=True)
    answers = {}
    for mode in MODES:
        print(f"engine {mode} ...", flush=True)
        options = engines.engine_options(args.model, mode, args.keep_tokens, args.engine_args)
        answers[mode] = engines.run_engine(engines.make_job(options, prompts, args.tokens))
    print(f"{'':20} {'first tokens':>13} {'tokens':>12} {'median |d|':>11} {'max |d|':>11} {'mean KL':>11}")
    for mode, base in (("mask", "off"), ("compact", "off"), ("compact", "mask")):
        got = engines.compare(answers[base], answers[mode])
        pair = f"{mode} against {base}"
        print(f"{pair:20} {f'{got.first}/{got.prompts}':>13} {f'{got.same}/{got.tokens}':>12} "
              f"{got.median:11.3g} {got.largest:11.3g} {got.kl:11.3g}"
              + (f"  ({got.unlisted} of {got.steps} steps not among the top {engines.TOP}: bounds)" if got.unlisted else ""))
    reach = (cfg.num_hidden_layers - 1 - cfg.last_kv_source) * (cfg.sliding_window - 1) + 1
    if args.keep_tokens >= reach:
        print(f"keep_tokens covers all that the layers behind the cut can look back on ({reach}): nothing can differ")
    if args.bound is not None and not got.largest <= args.bound:
        print(f"DIFFERENT: mask and compact differ by {got.largest:.3g}, over the bound of {args.bound:g}")
        return False
    return True
