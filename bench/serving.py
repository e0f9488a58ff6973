#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of the host's own model or of ours, and `vllm bench serve` against it at a few concurrencies.

    serving.py --impl host|plugin [--drafts 5] [--concurrency 1 8 64] [--csv FILE]       on a GPU
    serving.py --impl plugin --device cpu                                                tiny sizes: the bench itself

The timed model is steps.py's (8 layers of released sizes, dummy weights under which routing stays even), prompts are
random ids of --input tokens, answers have --output tokens, all at once up to the concurrency.  With --drafts they are
accepted at random, --accepted tokens a step on average.  Everything is in the path: HTTP, tokeniser, scheduler, sampling.
A concurrency that fails is a row; what is in the csv already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from hopper.cells import Cells, device_name, version
from hopper.model import write_model

COLUMNS = (
    "prompts", "completed", "output_tokens_per_s", "total_tokens_per_s", "tokens_per_s_user", "ttft_ms", "tpot_ms", "p99_tpot_ms", "seconds",
)
BENCH = Path(__file__).resolve().parent


def environment(folder: Path, impl: str) -> dict[str, str]:
    """Of the server's processes.  vLLM loads general plugins in each of them: one here, of no package, brings steps.py's weights."""
    info = folder / "dsv41_bench-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsv41-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ndsv41_bench = hopper.model:patch_dummy_weights\n")
    path = os.pathsep.join(filter(None, (str(folder), str(BENCH), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "DSV41_IMPL": impl, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def options(args: argparse.Namespace, longest: int) -> list[str]:
    cuda = args.device == "cuda"
    found = {
        "load-format": "dummy", "max-model-len": longest, "max-num-seqs": max(args.concurrency),
        "max-num-batched-tokens": 8192 if cuda else 128, "kv-cache-memory-bytes": int(args.kv_gib * 2**30),
        "gpu-memory-utilization": args.memory, "served-model-name": "timed",
    }
    flags = ["--no-enable-prefix-caching"]
    if args.impl == "host":
        flags.append("--language-model-only")
    else:
        found["block-size"] = 64 if cuda else 16
    if not cuda:
        flags.append("--enforce-eager")
    if args.drafts:
        found["speculative-config"] = json.dumps({
            "method": "dspark", "num_speculative_tokens": args.drafts, "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": args.accepted,
        })
    return [*flags, *(item for name, value in found.items() for item in (f"--{name}", str(value)))]


@contextmanager
def server(command: list[str], env: dict[str, str], url: str, log: Path, seconds: float):
    """A server that answers; ended with its children afterwards.  Seconds until it answered."""
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        begin = time.monotonic()
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text()[-1500:]}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if time.monotonic() - begin > seconds:
                    raise TimeoutError(f"no answer after {seconds:.0f} s: {log.read_text()[-1500:]}") from None
                time.sleep(0.5)
        yield time.monotonic() - begin
    finally:
        for sign in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(20)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue


def ask(args: argparse.Namespace, folder: Path, url: str, env: dict[str, str], concurrency: int) -> dict:
    """`vllm bench serve`: rounds of `concurrency` prompts, one round first that does not count."""
    prompts = concurrency * args.rounds
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url", url, "--model", "timed",
        "--tokenizer", str(folder), "--dataset-name", "random", "--random-input-len", str(args.input), "--random-output-len", str(args.output),
        "--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--num-warmups", str(concurrency), "--ignore-eos",
        "--temperature", "0", "--seed", str(args.seed), "--disable-tqdm", "--save-result", "--result-dir", str(folder),
        "--result-filename", "r.json", "--extra-body", json.dumps({"detokenize": False}),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.cell_seconds)
    if done.returncode:
        raise RuntimeError("vllm bench serve: " + (done.stdout + done.stderr)[-600:].strip().replace("\n", " | "))
    found = json.loads((folder / "r.json").read_text())
    if found["completed"] != prompts:
        raise RuntimeError(f"{found['completed']} of {prompts} requests were answered")
    if found["total_output_tokens"] != prompts * args.output:
        raise RuntimeError(f"{found['total_output_tokens']} tokens came back, {prompts * args.output} were asked for")
    return {
        "prompts": prompts, "completed": found["completed"], "output_tokens_per_s": f"{found['output_throughput']:.5g}",
        "total_tokens_per_s": f"{found['total_token_throughput']:.5g}", "tokens_per_s_user": f"{1e3 / found['median_tpot_ms']:.4g}",
        "ttft_ms": f"{found['median_ttft_ms']:.5g}", "tpot_ms": f"{found['median_tpot_ms']:.5g}", "p99_tpot_ms": f"{found['p99_tpot_ms']:.5g}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--impl", choices=("host", "plugin"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--accepted", type=float, default=3.5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--input", type=int, default=2048)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-gib", type=float, default=40)
    parser.add_argument("--memory", type=float, default=0.92)
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--cell-seconds", type=float, default=120)
    parser.add_argument("--seconds", type=float, default=1e9, help="no concurrency starts later")
    parser.add_argument("--log", type=Path, help="the server's output; default: a temporary file")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    stamp = {
        "device": device_name(args.device), "vllm": version("vllm"), "torch": version("torch"), "impl": args.impl,
        "humming": version("humming-kernels") if args.impl == "host" else "",
        "drafts": args.drafts, "input": args.input, "output": args.output,
    }
    cells = Cells(args.csv, stamp, COLUMNS, seconds=args.seconds, again=args.again)
    names = {f"serve-x{n}": n for n in args.concurrency}
    if not any(map(cells.wants, names)):
        print("nothing left to measure")
        return
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_model(folder, args.device == "cpu")
        env = environment(folder, args.impl)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port),
                   *options(args, args.input + args.output + 64)]
        try:
            with server(command, env, f"http://127.0.0.1:{port}", args.log or folder / "server.log", args.start_seconds) as start:
                print(f"{args.impl}: answers after {start:.0f} s", flush=True)
                for name, concurrency in names.items():
                    cells.run(name, lambda n=concurrency: ask(args, folder, f"http://127.0.0.1:{port}", env, n))
        except (RuntimeError, TimeoutError) as error:
            for name in filter(cells.wants, names):
                cells.add(name, "no server: " + str(error).splitlines()[0][:120])
            print(error, flush=True)


if __name__ == "__main__":
    main()
