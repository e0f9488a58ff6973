#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Do vLLM's own V4.1 model and ours agree?  Same checkpoint, same tokens, one GPU.

    agree.py run --impl host   CHECKPOINT OUT.pt        in-tree model, teacher-forced log-probabilities
    agree.py run --impl plugin CHECKPOINT OUT.pt        ours; [--dtype float32] [--no-activation-quant]
                                                        [--kv-cache-dtype fp8_ds_mla]
    agree.py reference CHECKPOINT OUT.pt                the float64 reference of tests/; [--kv-format v4]
                                                        [--no-activation-quant]
    agree.py calm CHECKPOINT                            scale the router biases, so that rounding cannot flip
                                                        an expert choice; in place
    agree.py report A.pt B.pt ...                       every pair: top-1 agreement, |difference| quantiles

Prompts are seeded random ids around the sizes at which something changes (window 128, 512 selected
rows, 16384 candidate rows).  Each is read whole (prefill) and continued greedily (decode).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from pathlib import Path

import torch
from rows import append

LENGTHS = (3, 40, 127, 128, 129, 130, 257, 640, 1100, 1500)
LONG = 17000
TOP = 20
GENERATED = 24


def prompts(seed: int, long: bool) -> list[list[int]]:
    """Random byte tokens of the tiny tokenizer, one prompt a length."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(n)] for n in (*LENGTHS, *((LONG,) if long else ()))]


def run(args: argparse.Namespace) -> None:
    os.environ["DSV41_IMPL"] = args.impl
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams

    begin = time.time()
    if args.impl == "plugin":
        extra = dict(additional_config={"dsv41": {"activation_quant": not args.no_activation_quant}}, block_size=64,
                     kv_cache_dtype=args.kv_cache_dtype)
    else:
        extra = dict(language_model_only=True)
    llm = LLM(
        args.checkpoint, dtype=args.dtype, max_model_len=20480, enforce_eager=True, max_num_seqs=16,
        max_num_batched_tokens=8192, kv_cache_memory_bytes=args.kv_gib << 30, enable_prefix_caching=False, gpu_memory_utilization=0.3,
        swa_bounded_replay=False, max_logprobs=TOP, **extra,
    )
    started = time.time() - begin
    tokens = prompts(args.seed, args.long)
    begin = time.time()
    # One at a time: in-tree batches of several prompts may take other kernels than single ones.
    read = llm.generate([{"prompt_token_ids": p} for p in tokens],
                        SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True,
                                       prompt_logprobs=TOP, logprobs=TOP))
    rows = []
    for p, output in zip(tokens, read, strict=True):
        generated = list(output.outputs[0].token_ids)
        rows.append({
            "prompt": p, "generated": generated,
            "prefill": table(output.prompt_logprobs[1:], p[1:]),
            "decode": table(output.outputs[0].logprobs, generated),
        })
    torch.save({"name": args.name, "rows": rows, "start_s": started, "run_s": time.time() - begin}, args.out)
    print(f"{args.name}: started in {started:.1f} s, ran in {time.time() - begin:.1f} s")


def table(entries: list, actual: list[int]) -> dict[str, torch.Tensor]:
    """Host log-probabilities -> top ids and values [n, TOP], and the actual tokens' [n]."""
    ids, values, own = [], [], []
    for entry, token in zip(entries, actual, strict=True):
        ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)[:TOP]
        ids.append([token for token, _ in ranked])
        values.append([value.logprob for _, value in ranked])
        own.append(entry[token].logprob)
    return {"ids": torch.tensor(ids, dtype=torch.int32), "values": torch.tensor(values), "own": torch.tensor(own)}


def reference(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from reference.model import ReferenceModel

    model = ReferenceModel(args.checkpoint, device=args.device, cache_weights=False, kv_format=args.kv_format,
                           activation_quant=not args.no_activation_quant)
    rows = []
    begin = time.time()
    for p in prompts(args.seed, False):
        logprobs = model.logprobs(p)[:-1].cpu()
        values, ids = logprobs.topk(TOP)
        own = logprobs.gather(1, torch.tensor(p[1:])[:, None])[:, 0]
        rows.append({"prompt": p, "generated": [], "prefill": {"ids": ids, "values": values, "own": own}})
    torch.save({"name": args.name, "rows": rows, "run_s": time.time() - begin}, args.out)
    print(f"{args.name}: {time.time() - begin:.1f} s")


def compare(a: dict, b: dict) -> list[dict]:
    """Per kind: prefill over all rows; decode as far as the generated tokens coincide."""
    found = []
    for kind in ("prefill", "decode"):
        difference, same, gaps = [], [], []
        for x, y in zip(a["rows"], b["rows"]):
            if kind not in x or kind not in y:
                continue
            n = len(x[kind]["own"])
            if kind == "decode":
                agree = [i == j for i, j in zip(x["generated"], y["generated"])]
                n = agree.index(False) if False in agree else n
                same += agree[: n + 1]
            else:
                top = x[kind]["ids"][:, 0] == y[kind]["ids"][:, 0]
                same += top.tolist()
                gaps.append((x[kind]["values"][:, 0] - x[kind]["values"][:, 1])[~top])
            difference.append((x[kind]["own"][:n] - y[kind]["own"][:n]).abs().double())
        if not difference:
            continue
        d = torch.cat(difference)
        q = torch.quantile(d, torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)).tolist()
        widest = float(torch.cat(gaps).max()) if gaps and len(torch.cat(gaps)) else 0.0
        found.append({
            "a": a["name"], "b": b["name"], "kind": kind, "rows": len(d), "top1_percent": 100 * sum(same) / len(same),
            "p50": q[0], "p90": q[1], "p99": q[2], "max": float(d.max()), "widest_gap_where_top1_differs": widest,
        })
    return found


def calm(args: argparse.Namespace) -> None:
    from safetensors.torch import load_file, save_file

    for path in Path(args.checkpoint).glob("*.safetensors"):
        tensors = load_file(path)
        biases = [name for name in tensors if name.endswith("ffn.gate.bias")]
        for name in biases:
            tensors[name] *= 30
        if biases:
            save_file(tensors, path)


def report(args: argparse.Namespace) -> None:
    results = [torch.load(path) for path in args.files]
    table = []
    for a, b in itertools.combinations(results, 2):
        for line in compare(a, b):
            table.append({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()})
            print("  ".join(f"{k} {v}" for k, v in table[-1].items()))
        for x, y in zip(a["rows"], b["rows"]):
            d = (x["prefill"]["own"] - y["prefill"]["own"]).abs()
            top = (x["prefill"]["ids"][:, 0] == y["prefill"]["ids"][:, 0]).double().mean()
            print(f"    {len(x['prompt']):6d} tokens: top-1 {100 * top:.2f} %, |d| median {d.median():.2e}, max {d.max():.2e}")
    if args.csv:
        stamp = dict(item.split("=", 1) for item in args.stamp)
        append(args.csv, [stamp | line for line in table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, action in (("run", run), ("reference", reference)):
        command = commands.add_parser(name)
        command.set_defaults(action=action)
        command.add_argument("checkpoint")
        command.add_argument("out")
        command.add_argument("--name")
        command.add_argument("--seed", type=int, default=20)
        command.add_argument("--no-activation-quant", action="store_true")
        command.add_argument("--device", default="cuda")
        if name == "run":
            command.add_argument("--impl", choices=("host", "plugin"), required=True)
            command.add_argument("--dtype", default="bfloat16")
            command.add_argument("--kv-cache-dtype", default="auto")
            command.add_argument("--long", action="store_true", help=f"also a prompt of {LONG} tokens")
            command.add_argument("--kv-gib", type=int, default=4)
        else:
            command.add_argument("--kv-format", choices=("v41", "v4"), default="v41")
    command = commands.add_parser("calm")
    command.set_defaults(action=calm)
    command.add_argument("checkpoint")
    command = commands.add_parser("report")
    command.set_defaults(action=report)
    command.add_argument("files", nargs="+")
    command.add_argument("--csv", type=Path)
    command.add_argument("--stamp", nargs="*", default=[], metavar="NAME=VALUE", help="leading columns of the csv")
    args = parser.parse_args()
    if hasattr(args, "out"):
        args.name = args.name or Path(args.out).stem
    args.action(args)


if __name__ == "__main__":
    main()
