#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Data parallel ranks under even and uneven load, and experts under the model's routing and a uniform one.

    imbalance.py --model DIR --ranks 8 --csv FILE [--delay 2.0] [--routing real uniform] [-- FLAGS OF vllm serve]
    imbalance.py --device cpu                                            tiny sizes, two ranks: the bench itself

One server a routing, with expert parallelism over --ranks data parallel ranks.  On each, the same requests three ways,
--requests a rank: `spread`, other ones on each rank; `mirror`, the same on every rank at once, so that all steps have
the same rows and each expert's load is the one of a rank many times over; `lag`, as mirror but rank r starts r x --delay
seconds late, so that some ranks prefill while others decode, and the first end while the last still run.  What `lag` takes
longer than its delay explains is what ranks waited for each other; what real routing costs over uniform is the experts'
imbalance.  `uniform` needs the plugin's model or vLLM's own MoE layer (VLLM_MOE_ROUTING_SIMULATION_STRATEGY).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hopper.cells import Cells, device_name, version
from hopper.model import write_model
from serving import environment, server

COLUMNS = ("requests", "output_tokens", "output_tokens_per_s", "ttft_ms", "p99_ttft_ms", "tpot_ms", "p99_tpot_ms", "rank_seconds", "late_s", "seconds")
MODES = ("spread", "mirror", "lag")
STRATEGY = {"real": "", "uniform": "uniform_random"}


@dataclass(frozen=True)
class Sent:
    """A request: on which rank, at which second, which prompt."""

    rank: int
    at: float
    prompt: int


def schedule(mode: str, ranks: int, requests: int, delay: float) -> list[Sent]:
    """`requests` a rank; prompts are numbered, spread has ranks x requests of them, the others share `requests`."""
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is none of {', '.join(MODES)}")
    return [
        Sent(rank, rank * delay if mode == "lag" else 0.0, rank * requests + n if mode == "spread" else n)
        for rank in range(ranks) for n in range(requests)
    ]


def draw_prompts(count: int, low: int, high: int, vocab: int, seed: int) -> list[list[int]]:
    """Token ids, lengths evenly from low to high."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


async def one(client, model: str, sent: Sent, prompt: list[int], tokens: int, begin: float) -> tuple[Sent, float, list[float]]:
    """When it was sent and when each token came, seconds since `begin`."""
    await asyncio.sleep(max(0.0, begin + sent.at - time.perf_counter()))
    start, came = time.perf_counter() - begin, []
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True}, extra_headers={"X-data-parallel-rank": str(sent.rank)},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            came += [time.perf_counter() - begin] * len(getattr(choice, "token_ids", None) or [])
    return sent, start, came


async def replay(url: str, model: str, plan: list[Sent], prompts: list[list[int]], tokens: int) -> list[tuple[Sent, float, list[float]]]:
    import httpx
    import openai

    limits = httpx.Limits(max_connections=len(plan) + 1)
    async with httpx.AsyncClient(limits=limits, timeout=None) as http:
        client, begin = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=3600, http_client=http), time.perf_counter()
        return await asyncio.gather(*(one(client, model, sent, prompts[sent.prompt], tokens, begin) for sent in plan))


def report(done: list[tuple[Sent, float, list[float]]], tokens: int) -> dict:
    """rank_seconds: when each rank had answered its last request, since its first was sent; late_s: the slowest over the fastest."""
    if short := [len(came) for _, _, came in done if len(came) != tokens]:
        raise RuntimeError(f"{len(short)} of {len(done)} requests gave {min(short)} to {max(short)} tokens, {tokens} were asked for")
    ends = {rank: max(came[-1] - sent.at for sent, _, came in done if sent.rank == rank) for rank in sorted({sent.rank for sent, _, _ in done})}
    whole = max(came[-1] for _, _, came in done)
    ttft = sorted(1e3 * (came[0] - start) for _, start, came in done)
    tpot = sorted(1e3 * (came[-1] - came[0]) / max(tokens - 1, 1) for _, _, came in done)
    last = lambda values: values[min(len(values) - 1, int(0.99 * len(values)))]  # noqa: E731
    return {
        "requests": len(done), "output_tokens": len(done) * tokens, "output_tokens_per_s": f"{len(done) * tokens / whole:.5g}",
        "ttft_ms": f"{statistics.median(ttft):.5g}", "p99_ttft_ms": f"{last(ttft):.5g}",
        "tpot_ms": f"{statistics.median(tpot):.5g}", "p99_tpot_ms": f"{last(tpot):.5g}",
        "rank_seconds": " ".join(f"{end:.4g}" for end in ends.values()), "late_s": f"{max(ends.values()) - min(ends.values()):.4g}",
    }


def measure(args: argparse.Namespace, url: str, mode: str, seed: int) -> dict:
    """Prompts of their own in each case: no prefix is found again."""
    prompts = draw_prompts(args.ranks * args.requests, args.low, args.high, args.vocab, seed)
    plan = schedule(mode, args.ranks, args.requests, args.delay)
    return report(asyncio.run(replay(url, "timed", plan, prompts, args.output)), args.output)


def command_of(args: argparse.Namespace, folder: Path, port: int) -> list[str]:
    found = {
        "host": "127.0.0.1", "port": port, "served-model-name": "timed", "max-model-len": args.high + args.output + 64,
        "data-parallel-size": args.ranks, "max-num-seqs": args.requests,
    }
    flags = ["--enable-expert-parallel", "--no-enable-prefix-caching", *(["--load-format", "dummy"] if args.model is None else [])]
    if args.device == "cpu":
        found |= {"block-size": 16, "kv-cache-memory-bytes": 64 << 20, "max-num-batched-tokens": 128}
        flags.append("--enforce-eager")
    items = [item for name, value in found.items() for item in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *items, *flags, *args.flags]


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and behind `--` the server's."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:cut], arguments[cut + 1 :]


def main() -> None:
    own, flags = split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the timed model with dummy weights, whose routing is even anyway")
    parser.add_argument("--impl", choices=("host", "plugin"), default="plugin")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, help="a rank; 64, on a CPU 4")
    parser.add_argument("--low", type=int, help="tokens of the shortest prompt; 512, on a CPU 8")
    parser.add_argument("--high", type=int, help="of the longest; 8192, on a CPU 200")
    parser.add_argument("--output", type=int, help="tokens of an answer; 256, on a CPU 8")
    parser.add_argument("--vocab", type=int, help="ids are drawn below it; 100000, on a CPU 500")
    parser.add_argument("--delay", type=float, default=2.0, help="seconds a rank")
    parser.add_argument("--routing", choices=tuple(STRATEGY), nargs="+", default=["real", "uniform"])
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-seconds", type=float, default=900)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args(own)
    args.flags = flags
    for name, gpu, cpu in (("requests", 64, 4), ("low", 512, 8), ("high", 8192, 200), ("output", 256, 8), ("vocab", 100_000, 500)):
        if getattr(args, name) is None:
            setattr(args, name, cpu if args.device == "cpu" else gpu)
    for routing in args.routing:
        serve(args, routing)


def serve(args: argparse.Namespace, routing: str) -> None:
    """One routing: a server, a first round that does not count, then each mode."""
    stamp = {
        "device": device_name(args.device), "vllm": version("vllm"), "torch": version("torch"), "impl": args.impl, "model": args.model and args.model.name or "dummy",
        "ranks": args.ranks, "delay": args.delay, "routing": routing, "flags": " ".join(args.flags),
    }
    cells = Cells(args.csv, stamp, COLUMNS, again=args.again)
    if not any(map(cells.wants, args.mode)):
        print(f"{routing}: nothing left to measure")
        return
    with tempfile.TemporaryDirectory() as path, socket.socket() as free:
        folder = Path(path)
        if args.model is None:
            write_model(folder, args.device == "cpu")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        env = environment(folder, args.impl) | {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": STRATEGY[routing]}
        url = f"http://127.0.0.1:{port}"
        try:
            with server(command_of(args, args.model or folder, port), env, url, folder / "server.log", args.start_seconds) as start:
                print(f"{routing}: answers after {start:.0f} s", flush=True)
                measure(args, url, "spread", args.seed)
                for n, mode in enumerate(args.mode):
                    cells.run(mode, lambda mode=mode, n=n: measure(args, url, mode, args.seed + 1 + n))
        except (RuntimeError, TimeoutError) as error:
            for mode in filter(cells.wants, args.mode):
                cells.add(mode, "no server: " + str(error).splitlines()[0][:120])
            print(error, flush=True)


if __name__ == "__main__":
    main()
