#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill tokens a second against context, with and without decoder replay: ours and the host's own model.

    prefill_replay.py run --impl plugin [--replay off compact] [--csv FILE]     both modes in turn, one process
    prefill_replay.py run --impl host --replay off|compact [--csv FILE]         a mode a process
    prefill_replay.py plot FILE.csv FILE.png

Dummy weights of the released sizes in 8 layers of ratios 0 0 2 2 1 1 1 1, KV sources 2 and 4, index
sources 2 and 4, no Engram: the decoder (layer 4 on) is half of the layers, as in the release (20 of 40).
off: swa_bounded_replay=False, all layers run every row.  compact: behind layer 4's caches ours runs the
last 140 rows of the prompt, the host's the last 128 of each chunk.  So about half of the work should go,
and more of it the longer the context is, since the decoder's index source scores one key a token and the
encoder's half a key.  "decoder_rows" is the share of rows that the last layer ran.

A step has 8192 new tokens: one prompt of `--chunks` steps, 4 prompts of 2048 tokens a step for 3 steps, 8
whole prompts of 1024; and a step of 2048, one whole prompt.  Times are those of the worker's step, the
device waited for before and after; the first round is thrown away; median, lowest and highest of the rest.
No prefix caching, no graphs (a step of 8192 tokens uses none), kernels of the host as it chooses them.

Plain torch unpacks each chosen expert once a step, whatever the rows: `--experts` below the released 384
makes that share smaller.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rows import append, commit

CHUNK, KEEP = 8192, 140
REAL = {
    "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "q_lora_rank": 1280, "o_lora_rank": 1024,
    "n_routed_experts": 384, "dspark_n_routed_experts": 128,
}
LAYERS = {
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0], "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4],
    "candidate_source_layer_id": 4, "engram_layer_ids": [], "engram_num_embeddings": [],
    "num_nextn_predict_layers": 3,
}
CUT, COUNT = 4, 8


@dataclass
class Step:
    """One step of the worker: requests, new rows, each request's context, ms, rows that the last layer ran."""

    requests: int
    rows: int
    context: int
    ms: float
    decoder: int


def write_config(folder: Path, small: bool, experts: int | None) -> None:
    """config.json and a tokenizer; `small`: the tiny preset's sizes, to try the bench without a GPU."""
    from deepseek_v41_plugin.cli import tiny_tokenizer as words
    from deepseek_v41_plugin.cli.tiny_presets import make_config

    overrides = LAYERS | ({} if small else REAL) | ({"n_routed_experts": experts} if experts else {})
    vocab = words.write_tokenizer(folder, 512, 1 << 20)
    named = {"bos": words.BOS, "eos": words.EOS, "pad": words.PAD, "image": words.IMAGE, "noise": words.NOISE}
    ids = {key: vocab[token] for key, token in named.items()}
    config = make_config("tiny" if small else "sm90", None, True, ids, 512, overrides)
    (folder / "config.json").write_text(json.dumps(config))


class Worker:
    """Times the steps of an engine in this process and counts what its last layer runs."""

    def __init__(self, llm, impl: str):
        import torch

        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self.runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.steps: list[Step] = []
        self.decoder: int | None = None
        execute, sample = self.runner.execute_model, self.runner.sample_tokens

        def execute_model(output, *args, **kwargs):
            self.wait()
            self.begin, self.decoder = time.perf_counter(), None
            result = execute(output, *args, **kwargs)
            if output.total_num_scheduled_tokens:
                held = [r.num_computed_tokens for r in output.scheduled_new_reqs]
                held += output.scheduled_cached_reqs.num_computed_tokens
                # Requests that are not in step with each other are no case of this bench.
                context = held[0] if len(set(held)) == 1 else -1
                self.steps.append(Step(len(held), output.total_num_scheduled_tokens, context, 0, 0))
                self.end()
            return result

        def sample_tokens(*args, **kwargs):
            result = sample(*args, **kwargs)
            if self.steps:
                self.end()
            return result

        self.runner.execute_model, self.runner.sample_tokens = execute_model, sample_tokens
        if impl == "plugin":
            self.runner.model.model.layers[-1].ffn.register_forward_pre_hook(lambda _, x: self.count(x[0].shape[0]))
        elif (replay := self.runner.model_state.decoder_replay_layers) is not None:
            run_layers = replay.run_layers

            def counted(hidden, *states):
                self.count(hidden.shape[0])
                return run_layers(hidden, *states)

            replay.run_layers = counted

    def count(self, rows: int) -> None:
        self.decoder = rows

    def end(self) -> None:
        self.wait()
        step = self.steps[-1]
        step.ms = 1e3 * (time.perf_counter() - self.begin)
        step.decoder = step.rows if self.decoder is None else self.decoder

    def replay(self, mode: str) -> None:
        """Ours only: the policy of the steps to come."""
        from deepseek_v41_plugin.replay import Policy

        self.runner.model_state.policy = Policy(self.runner.model.cfg.sliding_window, mode, KEEP)


def run(args: argparse.Namespace) -> None:
    os.environ["DSV41_IMPL"] = args.impl
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm

    if args.impl == "host":
        if len(args.replay) != 1:
            raise SystemExit("prefill_replay.py: the host's model takes one --replay a process")
        extra = dict(language_model_only=True, swa_bounded_replay=args.replay == ["compact"])
    else:
        extra = dict(block_size=64, swa_bounded_replay=False,
                     additional_config={"dsv41": {"decoder_replay": "compact", "keep_tokens": KEEP}})
    chunk = CHUNK if not args.small else 256
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.small, args.experts)
        llm = vllm.LLM(
            folder, load_format="dummy", max_model_len=args.chunks * chunk + 64, max_num_seqs=8,
            max_num_batched_tokens=chunk,
            long_prefill_token_threshold=chunk // 4,  # of several prompts; one alone takes the whole step
            kv_cache_memory_bytes=int(args.kv_gib * 2**30), enable_prefix_caching=False, async_scheduling=False,
            gpu_memory_utilization=args.memory, enforce_eager=True, **extra,
        )
    print(f"{args.impl} {' '.join(args.replay)}: started in {time.perf_counter() - begin:.0f} s", flush=True)
    worker, rng, vocab = Worker(llm, args.impl), random.Random(0), 250 if args.small else REAL["vocab_size"]
    cases = ((1, args.chunks * chunk), (4, min(args.chunks, 3) * chunk // 4), (8, chunk // 8), (1, chunk // 4))
    # The host's kernels are compiled for the shapes they meet, ours are not.
    warm = cases if args.impl == "host" else tuple((n, min(length, 2 * chunk // n)) for n, length in cases)
    seen: dict[tuple, list[Step]] = defaultdict(list)
    asked = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    begin, rounds = time.perf_counter(), 0

    def late() -> bool:
        return rounds > args.rounds or (rounds > 1 and time.perf_counter() - begin > args.seconds)

    while not late():
        for requests, length in cases if rounds else warm:
            if late():
                break
            prompts = [{"prompt_token_ids": [rng.randrange(3, vocab) for _ in range(length)]} for _ in range(requests)]
            for mode in args.replay:
                if args.impl == "plugin":
                    worker.replay(mode)
                worker.steps.clear()
                llm.generate(prompts, asked, use_tqdm=False)
                if rounds:
                    for step in worker.steps:
                        seen[mode, requests, length, step.rows, step.context].append(step)
                ms = sum(step.ms for step in worker.steps)
                print(f"round {rounds} {mode:7s} {requests} x {length}: {requests * length / ms * 1e3:.0f} tokens/s;"
                      f" steps of {' '.join(f'{step.ms:.0f}' for step in worker.steps)} ms", flush=True)
        rounds += 1
    table = []
    for (mode, requests, length, rows, context), steps in seen.items():
        ms = [step.ms for step in steps]
        table.append({
            "date": date.today(), "impl": args.impl, "replay": mode, "vllm": vllm.__version__, "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "commit": commit(),
            "layers": COUNT, "cut": CUT, "experts": args.experts or (8 if args.small else REAL["n_routed_experts"]),
            "requests": requests, "prompt": length, "context": context, "new_tokens": rows, "runs": len(ms),
            "ms": f"{statistics.median(ms):.2f}", "low": f"{min(ms):.2f}", "high": f"{max(ms):.2f}",
            "tokens_per_s": f"{rows / statistics.median(ms) * 1e3:.0f}",
            "decoder_rows": f"{sum(step.decoder for step in steps) / sum(step.rows for step in steps):.4f}",
        })
        print("  ".join(f"{name} {table[-1][name]}" for name in list(table[-1])[10:]), mode, flush=True)
    if args.csv:
        append(args.csv, table)


def plot(args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    most = max(int(r["new_tokens"]) for r in rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")

    def line(impl: str, mode: str, requests: int) -> dict[int, dict]:
        """Full steps by context; a later row of the file stands for an earlier one."""
        key = impl, mode, str(requests), str(most)
        found = {int(r["context"]): r for r in rows if (r["impl"], r["replay"], r["requests"], r["new_tokens"]) == key}
        return {context: found[context] for context in sorted(found) if context >= 0}

    for impl, name, colour in (("host", "vLLM's own model", "tab:blue"), ("plugin", "plugin, plain torch", "tab:orange")):
        for mode, style in (("off", "--"), ("compact", "-")):
            mine = line(impl, mode, 1)
            middle, slow, fast = ([most / float(r[at]) * 1e3 for r in mine.values()] for at in ("ms", "high", "low"))
            spread = [[m - s for m, s in zip(middle, slow, strict=True)], [f - m for m, f in zip(middle, fast, strict=True)]]
            at = [context / 1024 for context in mine]
            left.errorbar(at, middle, spread, color=colour, linestyle=style, marker="o", capsize=2, label=f"{name}, {mode}")
        for requests, marker, style in ((1, "o", "-"), (4, "^", ":")):
            off, compact = line(impl, "off", requests), line(impl, "compact", requests)
            both = [context for context in off if context in compact]
            gain = [float(off[context]["ms"]) / float(compact[context]["ms"]) for context in both]
            label = f"{name}, {requests} request{'s' * (requests > 1)}"
            right.plot([context / 1024 for context in both], gain, style, color=colour, marker=marker, label=label)
    left.set(xlabel="context (1024 tokens)", ylabel="new tokens a second", yscale="log")
    left.set_title(f"Steps of {most} new tokens, 1 request")
    left.legend()
    right.axhline(COUNT / CUT, color="grey", linewidth=0.8, linestyle="--", label="half of the layers left out")
    right.set(xlabel="context of each request (1024 tokens)", ylabel="off / compact, time of a step", ylim=(0.9, None))
    right.set_title("Gain of decoder replay")
    right.legend()
    figure.savefig(args.png, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.set_defaults(action=run)
    command.add_argument("--impl", choices=("host", "plugin"), required=True)
    command.add_argument("--replay", choices=("off", "compact"), nargs="+", default=["off", "compact"])
    command.add_argument("--chunks", type=int, default=9, help=f"steps of {CHUNK} tokens of the longest prompt")
    command.add_argument("--experts", type=int, help="routed experts; default: the released 384")
    command.add_argument("--seconds", type=float, default=60, help="no case starts later, once two rounds are done")
    command.add_argument("--rounds", type=int, default=5, help="at most, after the one that is thrown away")
    command.add_argument("--kv-gib", type=float, default=12)
    command.add_argument("--memory", type=float, default=0.9, help="gpu_memory_utilization")
    command.add_argument("--small", action="store_true", help="the tiny preset's sizes, steps of 256 tokens")
    command.add_argument("--csv", type=Path)
    command = commands.add_parser("plot")
    command.set_defaults(action=plot)
    command.add_argument("csv", type=Path)
    command.add_argument("png", type=Path)
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
