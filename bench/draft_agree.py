#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Do the drafts of vLLM's own DSpark and of ours agree?  Same checkpoint, same contexts, one GPU.

    draft_agree.py run --impl host|plugin CHECKPOINT OUT.pt     [--dtype float32] [--no-activation-quant]
                                                                [--kv-cache-dtype fp8_ds_mla] [--count N]
    draft_agree.py reference CHECKPOINT OUT.pt                  the float64 reference of tests/, on the first
                                                                --count; [--kv-format v4] [--no-activation-quant]
    draft_agree.py report A.pt B.pt ...                         every pair; [--csv FILE]

A context is a seeded random prompt, half of them within the window of 128 and half beyond it, and a random
token behind it that sampling is forced to take: so all sides draft from the same tokens, and only the
first block of each request counts.  Compared: the first draft and all drafts, the head's log-probabilities
before the Markov term (the same inputs at every draft, whatever was drafted before), and the confidences
of drafts whose predecessors are equal.
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

WINDOW, LONGEST, DRAFTS = 128, 1500, 5


def contexts(seed: int, count: int) -> list[tuple[list[int], int]]:
    """(prompt, forced token) of byte tokens, short and long prompts in turn."""
    rng = random.Random(seed)

    def draw(n: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(n)]

    bounds = ((1, WINDOW), (WINDOW + 1, LONGEST))
    return [(draw(rng.randint(*bounds[i % 2])), draw(1)[0]) for i in range(count)]


class Drafts:
    """Keeps the first block that an engine in this process drafts for each prompt."""

    def __init__(self, llm):
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.speculator, self.states = runner.speculator, runner.req_states
        self.found: dict[tuple, dict] = {}
        self.block: dict[str, torch.Tensor] = {}
        self._propose, self._sample = self.speculator.propose, self.speculator._sample_sequential
        self.speculator.propose, self.speculator._sample_sequential = self.propose, self.sample

    def sample(self, count: int, hidden: torch.Tensor) -> None:
        """The host's Markov steps, and what they leave behind only when verification is scheduled."""
        self._sample(count, hidden)
        own, k = self.speculator, self.speculator.num_speculative_steps
        rows = hidden[own.sample_indices[: count * k]]
        anchor = own.input_buffers.input_ids[own._anchor_idx[:count]].long()
        drafts = own.draft_tokens[:count].long()
        before = torch.cat((anchor[:, None], drafts[:, :-1]), 1)
        embedded = own.model.markov_embed(before.flatten())
        base = own.model.compute_draft_logits(rows).view(count, k, -1).float()
        bias = own.model.markov_bias(embedded).view(count, k, -1).float()
        confidence = own.model.compute_confidence(rows, embedded).view(count, k)
        self.block = {
            "anchor": anchor, "drafts": drafts, "base": base, "logits": base + bias, "confidence": confidence.float(),
        }

    def propose(self, input_batch, metadata, slots, hidden, features, num_sampled, num_rejected, *args, **kwargs):
        self.block = {}
        drafts = self._propose(input_batch, metadata, slots, hidden, features, num_sampled, num_rejected, *args, **kwargs)
        block = {name: value.cpu() for name, value in self.block.items()}
        for i, sampled in enumerate(num_sampled[: len(input_batch.req_ids)].tolist()):
            slot = int(input_batch.idx_mapping[i])
            prompt = tuple(self.states.all_token_ids.gpu[slot, : int(self.states.prompt_len.np[slot])].tolist())
            if sampled and block and prompt not in self.found:
                self.found[prompt] = {name: value[i] for name, value in block.items()}
        return drafts


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
        args.checkpoint, dtype=args.dtype, max_model_len=2048, enforce_eager=True, max_num_seqs=16,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=int(args.kv_gib * 2**30), enable_prefix_caching=False, gpu_memory_utilization=args.memory,
        swa_bounded_replay=False, speculative_config={"method": "dspark", "num_speculative_tokens": args.drafts}, **extra,
    )
    print(f"{args.name}: started in {time.time() - begin:.1f} s", flush=True)
    begin, drafts, asked = time.time(), Drafts(llm), contexts(args.seed, args.count)
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in asked],
        [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, allowed_token_ids=[token]) for _, token in asked],
        use_tqdm=False,
    )
    rows = []
    for prompt, token in asked:
        found = drafts.found.get(tuple(prompt))
        if found is None or int(found["anchor"]) != token:
            raise SystemExit(f"{args.name}: no block behind a prompt of {len(prompt)} tokens and token {token}")
        rows.append(found | {"prompt": prompt})
    torch.save({"name": args.name, "rows": rows}, args.out)
    print(f"{args.name}: {len(rows)} blocks in {time.time() - begin:.1f} s", flush=True)


def reference(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.reference import ReferenceDraft, ReferenceModel

    model = ReferenceModel(args.checkpoint, device=args.device, cache_weights=False, kv_format=args.kv_format,
                           activation_quant=not args.no_activation_quant)
    draft, rows, begin = ReferenceDraft(model), [], time.time()
    for prompt, token in contexts(args.seed, args.count):
        if time.time() - begin > args.seconds:
            break
        block = draft.propose(prompt, token, k=args.drafts)
        rows.append({
            "prompt": prompt, "anchor": torch.tensor(token), "drafts": torch.tensor(block.tokens),
            "base": block.base_logits.cpu().float(), "logits": block.logits.cpu().float(),
            "confidence": block.confidence.cpu().float(),
        })
    torch.save({"name": args.name, "rows": rows}, args.out)
    print(f"{args.name}: {len(rows)} blocks in {time.time() - begin:.1f} s", flush=True)


def compare(a: dict, b: dict, kind: str) -> dict | None:
    """Blocks behind the same context; kind: all, or those behind a short or a long prompt."""
    other = {(*row["prompt"], int(row["anchor"])): row for row in b["rows"]}
    first, every, head, confidence, lead, runs = [], [], [], [], [], []
    for x in a["rows"]:
        y = other.get((*x["prompt"], int(x["anchor"])))
        if y is None or kind == ("long" if len(x["prompt"]) <= WINDOW else "short"):
            continue
        same = (x["drafts"] == y["drafts"]).int()
        equal = int(same.cumprod(0).sum())
        runs.append(equal)
        first.append(bool(same[0]))
        every.append(equal == len(same))
        p, q = x["base"].double().log_softmax(-1), y["base"].double().log_softmax(-1)
        best = p.argmax(-1, keepdim=True)
        head.append((p - q).gather(1, best)[:, 0].abs())
        confidence.append((x["confidence"] - y["confidence"])[: equal + 1].abs().double())
        if not same[0]:
            two = x["logits"][0].topk(2).values
            lead.append(float(two[0] - two[1]))
    if not first:
        return None
    head, confidence, n = torch.cat(head), torch.cat(confidence), len(first)
    return {
        "a": a["name"], "b": b["name"], "kind": kind, "blocks": n,
        "first_equal_percent": 100 * sum(first) / n,
        "all_equal_percent": 100 * sum(every) / n, "equal_run": sum(runs) / n,
        "head_p50": float(head.median()), "head_p99": float(head.quantile(0.99)),
        "confidence_p50": float(confidence.median()), "confidence_p99": float(confidence.quantile(0.99)),
        "confidence_max": float(confidence.max()),
        "widest_lead_where_first_differs": max(lead, default=0.0),
    }


def report(args: argparse.Namespace) -> None:
    results, table = [torch.load(path) for path in args.files if Path(path).exists()], []
    for missing in (path for path in args.files if not Path(path).exists()):
        print(f"{missing}: not there, left out")
    for a, b in itertools.combinations(results, 2):
        for kind in ("all", "short", "long"):
            if line := compare(a, b, kind):
                table.append({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()})
                print("  ".join(f"{name} {value}" for name, value in table[-1].items()))
    if args.csv and table:
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
        command.add_argument("--count", type=int, default=200)
        command.add_argument("--drafts", type=int, default=DRAFTS)
        command.add_argument("--no-activation-quant", action="store_true")
        if name == "run":
            command.add_argument("--impl", choices=("host", "plugin"), required=True)
            command.add_argument("--dtype", default="bfloat16")
            command.add_argument("--kv-cache-dtype", default="auto")
            command.add_argument("--kv-gib", type=float, default=4)
            command.add_argument("--memory", type=float, default=0.3, help="gpu_memory_utilization")
        else:
            command.add_argument("--device", default="cuda")
            command.add_argument("--kv-format", choices=("v41", "v4"), default="v41")
            command.add_argument("--seconds", type=float, default=60, help="no block starts later than this")
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
