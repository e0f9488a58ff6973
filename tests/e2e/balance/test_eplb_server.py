# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with two data parallel ranks, expert parallel, whose experts move while they answer."""

import asyncio
import json
import re
import time

import numpy as np
import pytest

from deepseek_v41_plugin.cli.main import main as dsv41
from tests.e2e.engine.harness import TIE, random_prompt
from tests.e2e.server.harness import LOGPROB_BOUND, serving

KEEP = 12  # prompt tokens behind the last KV source: the ranks' rows differ in number there too
RANKS, REDUNDANT = 2, {"target": 2, "draft": 2}


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    return tmp_path_factory.mktemp("loads") / "loads.npz"


@pytest.fixture(scope="module")
def server(checkpoint, loads, tmp_path_factory):
    """Rebalanced every 30 steps, the draft every 20."""
    options = {"exact": True, "decoder_replay": "compact", "keep_tokens": KEEP, "eplb_record": str(loads), "eplb_timeout": 300, "draft_eplb_config": {"num_redundant_experts": REDUNDANT["draft"], "step_interval": 20, "window_size": 10}}
    with serving(
        checkpoint, tmp_path_factory.mktemp("log") / "eplb.log",
        "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
        "--kv-cache-memory-bytes", "16M", "--block-size", "16", "--no-enable-prefix-caching",
        "--data-parallel-size", str(RANKS), "--enable-expert-parallel",
        "--enable-eplb", "--eplb-config", json.dumps({"num_redundant_experts": REDUNDANT["target"], "step_interval": 30, "window_size": 30}),
        "--speculative-config", json.dumps({"method": "dspark", "num_speculative_tokens": 3}),
        "--additional-config", json.dumps({"dsv41": options}), "--no-swa-bounded-replay",
    ) as running:  # fmt: skip
        yield running


def samples(server) -> dict[tuple[str, str], float]:
    """(name behind dsv41_eplb_, part or part and position) -> value."""
    found = {}
    for line in server.get("/metrics").splitlines():
        if match := re.fullmatch(r"vllm:dsv41_eplb_(\w+?)(?:_total)?\{(.*)\} (\S+)", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            found[match[1], labels["part"] + labels.get("position", "")] = float(match[3])
    return found


def ask(server, reference, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, all asked at once, compared with the reference's."""
    client = server.async_client(300)

    async def one(prompt):
        reply = await client.completions.create(
            model=server.model, prompt=prompt, max_tokens=8, temperature=0, logprobs=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return reply.choices[0]

    async def everyone():
        return await asyncio.gather(*map(one, prompts))

    answers = []
    for prompt, choice in zip(prompts, asyncio.run(everyone()), strict=True):
        check(reference, prompt, choice.token_ids, choice.logprobs.token_logprobs)
        answers.append(list(choice.token_ids))
    return answers


def check(reference, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    """Against the reference under the same approximation; it reads text only, and a random model may say an image."""
    if reference.config.image_token_id in tokens:
        tokens = tokens[: tokens.index(reference.config.image_token_id)]
    run = reference.run([*prompt, *tokens], decoder_start=max(len(prompt) - KEEP, 0))
    rows = (run.hidden @ reference.weights.matrix("head").T).log_softmax(-1)
    for step, (token, logprob) in enumerate(zip(tokens, logprobs)):
        row, where = rows[len(prompt) - 1 + step - run.start], f"prompt of {len(prompt)}, output token {step}"
        assert float(row.max() - row[token]) < TIE, f"{where}: {token}, reference {int(row.argmax())}"
        assert abs(logprob - float(row[token])) < LOGPROB_BOUND, f"{where}: logprob off by {abs(logprob - float(row[token]))}"


def test_answers_before_during_and_after(server, reference, run_rng, loads):
    """Both models are rebalanced to the end with experts moved; all answers are the reference's, the same ones each time."""
    prompts = [random_prompt(run_rng, reference, run_rng.randrange(1, 40)) for _ in range(6)]
    # Chunks that leave no row behind the cut: on one rank, then on both.
    ask(server, reference, [random_prompt(run_rng, reference, 110)])
    ask(server, reference, [random_prompt(run_rng, reference, run_rng.randrange(90, 200)) for _ in range(2)])
    first, end = ask(server, reference, prompts), time.monotonic() + 1200
    while True:
        now = samples(server)
        if all(now.get(("rebalances_finished", part), 0) >= 2 and now["moved_experts", part] for part in ("target", "draft")):
            break
        assert time.monotonic() < end, f"no two rebalances: {now}; {server.log.read_text()[-3000:]}"
        assert ask(server, reference, prompts) == first
        fresh = [random_prompt(run_rng, reference, run_rng.randrange(1, 40)) for _ in range(4)]
        ask(server, reference, fresh)
    assert ask(server, reference, prompts) == first
    check_shown(now)
    check_recorded(loads, reference.config.kv_source_layer_ids[-1])


def check_shown(now: dict) -> None:
    for part, redundant in REDUNDANT.items():
        assert 0 < now["balancedness", part] <= 1 and 0 < now["balancedness_planned", part] <= 1
        assert now["moved_bytes", part] % now["moved_experts", part] == 0 < now["moved_bytes", part]
        assert now["rebalance_seconds", part] >= now["last_rebalance_seconds", part] > 0
        assert 1 <= now["hottest_replicas", part + "0"] <= 1 + redundant


def check_recorded(loads, cut: int) -> None:
    """What the engine wrote is what `dsv41 eplb-sim` reads."""
    for path, layers, experts in ((loads, 8, 8), (loads.with_stem(loads.stem + "-draft"), 2, 4)):
        with np.load(path) as file:
            recorded, sizes = file["loads"], (int(file["ranks"]), int(file["redundant"]))
        assert recorded.shape[1:] == (layers, experts) and len(recorded) >= 2 and recorded.any()
        # Every row has as many experts in each layer, and fewer rows run behind the cut.
        rows, behind = recorded.sum(2), cut if path == loads else 0
        assert (rows[:, :behind] == rows[:, :1]).all() and (rows[:, behind:] == rows[:, -1:]).all()
        assert path != loads or (rows[:, -1] < rows[:, 0]).any()
        assert sizes == (RANKS, REDUNDANT["target" if path == loads else "draft"])
        assert dsv41(["eplb-sim", str(path)]) in (0, None)
