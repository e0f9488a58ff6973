#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of the host's own model and of ours, on the same checkpoint, one process each.

    speed.py --impl host|plugin CHECKPOINT [--csv FILE]

Prefill: tokens a second for one step of 8 x 1024 new tokens.  Decode: milliseconds a step for 8 and
64 requests of about 1024 tokens.  Median of five runs after one that is thrown away, with the range.
The host runs as it starts by default, CUDA graphs on; ours has none yet.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from datetime import date
from pathlib import Path

from rows import append, commit

RUNS, LENGTH, STEPS = 5, 1024, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--impl", choices=("host", "plugin"), required=True)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    os.environ["DSV41_IMPL"] = args.impl
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    import vllm

    extra = dict(language_model_only=True) if args.impl == "host" else dict(block_size=64)
    begin = time.perf_counter()
    llm = vllm.LLM(
        args.checkpoint, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=8 * LENGTH,
        kv_cache_memory_bytes=8 << 30, enable_prefix_caching=False, swa_bounded_replay=False,
        gpu_memory_utilization=0.4, **extra,
    )
    start = time.perf_counter() - begin
    rng = random.Random(0)

    def seconds(requests: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(3, 250) for _ in range(LENGTH)]} for _ in range(requests)]
        begin = time.perf_counter()
        llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begin

    def record(name: str, unit: str, values: list[float]) -> None:
        row = {
            "date": date.today(), "impl": args.impl, "vllm": vllm.__version__, "torch": torch.__version__,
            "device": torch.cuda.get_device_name(), "commit": commit(), "what": name, "unit": unit,
            "median": f"{statistics.median(values):.3f}", "low": f"{min(values):.3f}", "high": f"{max(values):.3f}",
        }
        print("  ".join(map(str, row.values())), flush=True)
        if args.csv:
            append(args.csv, [row])

    record("start", "s", [start])
    seconds(8, 1)
    record(f"prefill 8 x {LENGTH}", "tokens/s", [8 * LENGTH / seconds(8, 1) for _ in range(RUNS)])
    for requests in (8, 64):
        seconds(requests, STEPS)
        # The difference of a long and a short run leaves the decode steps alone.
        steps = [(seconds(requests, STEPS) - seconds(requests, 1)) / (STEPS - 1) * 1e3 for _ in range(RUNS)]
        record(f"decode {requests} requests at {LENGTH}", "ms/step", steps)


if __name__ == "__main__":
    main()
