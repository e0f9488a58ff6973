#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of the whole model at exact batch shapes, the host's own model or ours, one process each.

    steps.py --impl host|plugin [CHECKPOINT] [--drafts 5] [--replay off] [--only REGEX] [--csv FILE] [--profile]

CHECKPOINT: a folder with a config.json (weights stay dummy); left out, 8 layers of the released sizes (hopper/model.py).
The worker is driven by crafted steps over KV filled by fiat (hopper/driver.py says what is real and what is not).
Cells, each with the median, lowest and highest of several runs:

    start                  s until the engine answers, graphs captured
    kv-cN                  tokens of KV a GiB for requests of N tokens, windows counted
    pool                   s to fill the KV pool, and how even the routing was: `most`, `used` (hopper/routing.py)
    prefill-qQ-cC          ms for Q new tokens on C in the KV, in steps of --chunk
    decode-bB-cC           ms a step of B requests with C in the KV each, `graph`: share of steps that were one CUDA graph;
                           forward_ms and sample_ms on the device, host_ms to start a step; with --drafts K each
                           request has K + 1 rows, and drafts are accepted at random, --accepted of K + 1 on average

The host's rows say which Humming was installed: 0.33.0 requires it and prefers it on SM90, but takes Marlin without a
word where it is missing, and then is not what users have.  What is in the csv already is not measured again.  A cell
that fails is a row with its error.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from hopper.cells import Cells, Lost, device_name, spread, version
from hopper.model import patch_dummy_weights, write_model

SIZES = {  # contexts, batches, prefill rows, prefill contexts, KV reader, chunk, steps a run
    "cuda": ((4096, 32768, 131072), (8, 64, 1, 256), (8192, 32768), (0, 131072), 16384, 8192, 16),
    "cpu": ((64, 256), (3, 1), (32, 80), (0, 128), 256, 64, 2),
}
COLUMNS = (
    "unit", "median", "low", "high", "runs", "forward_ms", "sample_ms", "host_ms", "tokens_per_s", "said_per_row", "graph",
    "shared", "finite", "most", "used", "seconds",
)


class Bench:
    """One engine and its cells."""

    def __init__(self, args: argparse.Namespace, cells: Cells):
        self.args, self.cells = args, cells
        self.contexts, self.batches, self.news, self.olds, self.read, chunk, self.steps = SIZES[args.device]
        self.chunk = args.chunk or chunk
        self.rows = 1 + args.drafts
        self.warm = 3
        # Each request serves two cells of a context at most.
        self.growth = 2 * self.rows * (self.warm + args.runs * self.steps + 3 * args.profile) + 8

    def wanted(self) -> list[str]:
        """The cells that need an engine."""
        names = ["start", "pool", *(f"kv-c{c}" for c in self.contexts)]
        names += [f"prefill-q{q}-c{c}" for c in self.olds for q in self.news] if not self.args.drafts else []
        names += [f"decode-b{b}-c{c}" for c in self.contexts for b in self.batches]
        return [name for name in names if self.cells.wants(name)]

    def start(self, folder: str):
        import vllm

        args, cuda = self.args, self.args.device == "cuda"
        patch_dummy_weights()
        longest = max(max(self.contexts) + self.growth, max(self.olds) + max(self.news)) + 64
        options = dict(
            load_format="dummy", max_model_len=-(-longest // 256) * 256, max_num_seqs=max(self.batches),
            max_num_batched_tokens=max(self.chunk, max(self.batches) * self.rows), kv_cache_memory_bytes=int(args.kv_gib * 2**30),
            enable_prefix_caching=False, swa_bounded_replay=args.replay == "on", gpu_memory_utilization=args.memory,
        )
        if args.impl == "host" and args.backends != "auto":
            options["moe_backend"], options["linear_backend"] = (args.backends.split(",") * 2)[:2]
        options |= dict(language_model_only=True) if args.impl == "host" else dict(block_size=64 if cuda else 16)
        if args.drafts:
            options["speculative_config"] = {
                "method": "dspark", "num_speculative_tokens": args.drafts, "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": args.accepted,
            }
        if args.eager or not cuda:
            options["enforce_eager"] = True
        else:
            sizes = sorted({b * self.rows for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b <= max(self.batches)})
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        begin = time.perf_counter()
        llm = vllm.LLM(folder, **options)
        if self.cells.wants("start"):
            self.cells.add("start", unit="s", **spread([time.perf_counter() - begin]), runs=1)
        return llm

    def run(self, llm) -> None:
        from hopper.driver import Driver

        self.driver = driver = Driver(llm, self.args.drafts)
        for context in self.contexts:
            self.cells.run(f"kv-c{context}", lambda c=context: {"unit": "tokens/GiB", **spread([driver.tokens_per_gib(c)])})
        self.fill()
        if not self.args.drafts:
            for old in self.olds:
                for new in self.news:
                    self.cells.run(f"prefill-q{new}-c{old}", lambda q=new, c=old: self.prefill(q, c))
        for context in self.contexts:
            self.decodes(context)

    def fill(self) -> None:
        """Needed by all cells behind it, so it runs whether or not its row is there."""
        from hopper.routing import counting, evenness

        begin, driver = time.perf_counter(), self.driver
        batch = max(self.batches)
        own = max(
            max(batch * driver.own_blocks(c, c + self.growth) for c in self.contexts),
            max(driver.own_blocks(c, c + q) for c in self.olds for q in self.news),
        )
        top_k = driver.runner.model_config.hf_text_config.num_experts_per_tok
        with counting(self.args.impl, driver.runner.model, top_k) as counts:
            driver.fill_cache(self.read, self.chunk, own)
        if self.cells.wants("pool"):
            self.cells.add("pool", unit="s", **spread([time.perf_counter() - begin]), **evenness(counts))

    def prefill(self, new: int, old: int) -> dict:
        driver, ms, forward = self.driver, [], []
        for run in range(self.args.runs + 1):
            (request,), shared = driver.requests(1, old, old + new, old + new)
            driver.marks = []
            begin = time.perf_counter()
            driver.prefill(request, self.chunk)
            driver.wait()
            if run:
                ms.append(1e3 * (time.perf_counter() - begin))
                steps = -(-new // self.chunk)
                forward.append(driver.device_times()["forward_ms"] * steps)
            finite = driver.finite()
            driver.finish([request])
            if run > 1 and sum(ms) / 1e3 > self.args.cell_seconds:
                break
        found = spread(ms)
        self.profile(f"prefill-q{new}-c{old}", lambda: self.prefill_once(new, old), 1)
        return {
            "unit": "ms", **found, "runs": len(ms), "tokens_per_s": f"{new / float(found['median']) * 1e3:.5g}",
            "forward_ms": spread(forward)["median"], "shared": f"{shared:.2f}", "finite": finite,
        }

    def prefill_once(self, new: int, old: int) -> None:
        (request,), _ = self.driver.requests(1, old, old + new, old + new)
        self.driver.prefill(request, self.chunk)
        self.driver.finish([request])

    def decodes(self, context: int) -> None:
        """All batches of a context: the requests are made once, small batches take other ones than their neighbours do."""
        wanted = [b for b in self.batches if self.cells.wants(f"decode-b{b}-c{context}")]
        if not wanted:
            return
        driver, made = self.driver, []

        def make() -> None:
            found, self.shared = driver.requests(max(wanted), context, context + 1, context + self.growth)
            made.extend(found)
            for i in range(0, len(made), self.chunk):
                driver.read(driver.step([(request, 1, 0) for request in made[i : i + self.chunk]]))

        used = 0
        for batch in wanted:
            def measure(batch=batch) -> dict:
                nonlocal used
                if not made:
                    make()
                begin = used if used + batch <= len(made) else 0
                used = begin + batch
                return self.decode(made[begin : begin + batch], context)

            self.cells.run(f"decode-b{batch}-c{context}", measure)
        if made:
            driver.finish(made)

    def decode(self, requests: list, context: int) -> dict:
        driver, batch = self.driver, len(requests)
        one = driver.decode(requests, self.warm)["ms"]
        steps = max(2, min(self.steps, int(1e3 * self.args.cell_seconds / max(one, 1e-3) / self.args.runs)))
        before = driver.full_replays
        runs = [driver.decode(requests, steps) for _ in range(self.args.runs)]
        graph = (driver.full_replays - before) / (steps * len(runs))
        finite = driver.finite()
        ms = [run["ms"] for run in runs]
        said = sum(run["said"] for run in runs) / (steps * len(runs) * batch)
        middle = {name: spread([run[name] for run in runs])["median"] for name in ("forward_ms", "sample_ms", "host_ms")}
        self.profile(f"decode-b{batch}-c{context}", lambda: driver.decode(requests, 3), 3)
        found = spread(ms)
        return {
            "unit": "ms", **found, "runs": f"{len(ms)}x{steps}", **middle, "tokens_per_s": f"{batch * said / float(found['median']) * 1e3:.5g}",
            "said_per_row": f"{said:.3f}", "graph": f"{graph:.2f}", "shared": f"{self.shared:.2f}", "finite": finite,
        }

    def profile(self, case: str, run, steps: int) -> None:
        if not self.args.profile:
            return
        from hopper.profile import profile, table

        try:
            rows = profile(run, steps, self.driver.cuda)
        except Exception as error:  # noqa: BLE001  a cell without its profile is still a cell
            print(f"{case}: no profile: {type(error).__name__}: {error}", flush=True)
            return
        print(f"{case}:\n{table(rows)}", flush=True)
        if self.args.csv:
            from rows import append

            append(self.args.csv.with_name(self.args.csv.stem + "-profile.csv"), [self.cells.stamp | {"case": case} | row for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--impl", choices=("host", "plugin"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try the bench itself")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--accepted", type=float, default=3.5, help="tokens a request says in a step with drafts, on average")
    parser.add_argument("--replay", choices=("on", "off"), default="on", help="swa_bounded_replay, the decoder's included; vLLM's default is on")
    parser.add_argument("--backends", default="auto", help="the host's --moe-backend and --linear-backend, as marlin or humming,marlin")
    parser.add_argument("--chunk", type=int, help="rows of a prefill step; default 8192")
    parser.add_argument("--only", default="", help="cells whose name this regular expression finds")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell starts later")
    parser.add_argument("--cell-seconds", type=float, default=4.0, help="fewer or shorter runs where they would take longer")
    parser.add_argument("--kv-gib", type=float, default=48)
    parser.add_argument("--memory", type=float, default=0.92, help="gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="each cell's kernels after it, by family; csv beside --csv")
    parser.add_argument("--again", action="store_true", help="also what is in the csv already")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    os.environ["DSV41_IMPL"] = args.impl
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import torch
    import vllm

    stamp = {
        "device": device_name(args.device), "vllm": vllm.__version__, "torch": torch.__version__, "impl": args.impl,
        "humming": version("humming-kernels") if args.impl == "host" else "", "backends": args.backends,
        "drafts": args.drafts, "replay": args.replay, "chunk": args.chunk or SIZES[args.device][5],
    }
    if args.impl == "host" and stamp["humming"] == "absent" and args.backends == "auto":
        print("humming-kernels is not installed: this is NOT vLLM as released, which prefers it on SM90", flush=True)
    cells = Cells(args.csv, stamp, COLUMNS, args.only, args.seconds, args.again)
    bench = Bench(args, cells)
    if not bench.wanted():
        print("nothing left to measure")
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.checkpoint is None:
                write_model(Path(folder), args.device == "cpu")
            llm = bench.start(args.checkpoint or folder)
            bench.run(llm)
    except Lost as lost:
        print(lost, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
