# SPDX-License-Identifier: Apache-2.0
"""Many clients at once, clients that leave, and what /metrics says of them."""

import asyncio
import time

import openai
import pytest

from tests.e2e.server.harness import bias_of, check_greedy

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USE, SAID = "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total"


def request(server, words, prompt, **more):
    body = dict(ignore_eos=True, return_token_ids=True)
    return dict(
        model=server.model, prompt=prompt, temperature=0, logit_bias=bias_of(words),
        extra_body=body, **{"max_tokens": 4} | more,
    )  # fmt: skip


async def ask(client, given, streamed):
    """(text, token ids) of the answer."""
    if not streamed:
        choice = (await client.completions.create(**given)).choices[0]
        return choice.text, choice.token_ids
    text, tokens = "", []
    async for chunk in await client.completions.create(**given, stream=True):
        text += chunk.choices[0].text
        tokens += chunk.choices[0].token_ids or []
    return text, tokens


def test_64_clients(server, prompt, reference, words):
    prompts = [prompt(3 + i % 37) for i in range(64)]
    given = [request(server, words, ids) for ids in prompts]

    async def one(i):
        async with server.async_client() as client:  # a connection of its own
            return await ask(client, given[i], streamed=i % 2 == 0)

    async def everyone():
        return await asyncio.gather(*(one(i) for i in range(64)))

    for ids, (_, tokens) in zip(prompts, asyncio.run(everyone()), strict=True):
        assert len(tokens) == 4
        check_greedy(reference, ids, tokens, words)


def test_prefix_hits_are_counted_and_harmless(client, server, prompt, reference, words):
    """52 tokens: three whole blocks of 16 are found again, whatever follows them."""
    first = prompt(52)
    second = [*first[:49], *prompt(5)]
    before = server.metrics()
    given = [request(server, words, ids) for ids in (first, first, second)]
    replies = [client.completions.create(**body) for body in given]
    after = server.metrics()
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]
    assert cached == [0, 48, 48]
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:prefix_cache_hits_total"] == 96
    assert grown["vllm:prefix_cache_queries_total"] == 52 + 52 + 54
    assert grown["vllm:generation_tokens_total"] == 12
    assert replies[0].choices[0].token_ids == replies[1].choices[0].token_ids
    for ids, reply in zip((first, second), replies[1:]):
        check_greedy(reference, ids, reply.choices[0].token_ids, words)


def quiet_again(server, level: float, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while True:
        now = server.metrics()
        if now[RUNNING] == now[WAITING] == 0 and now[KV_USE] <= level + 1e-9:
            return
        assert time.monotonic() < end, {name: now[name] for name in (RUNNING, WAITING, KV_USE)}
        time.sleep(0.2)


def closes_half_way(server, long) -> None:
    """Reads the beginning of a stream, sees that it is worked on, and closes it."""
    before = server.metrics()
    with server.client() as client, client.completions.create(**long, stream=True) as stream:
        for _, chunk in zip(range(3), stream):
            assert chunk.choices
        now = server.metrics()
        if now[SAID] - before[SAID] < long["max_tokens"]:  # else this process was held up, and the answer is over
            assert now[RUNNING] == 1 and now[KV_USE] > before[KV_USE]


def does_not_wait(server, long) -> None:
    with pytest.raises(openai.APITimeoutError):  # 1900 tokens in 2 s?
        server.client(timeout=2).completions.create(**long)


@pytest.mark.parametrize("leaves", [closes_half_way, does_not_wait])
def test_clients_that_leave(server, client, prompt, reference, words, leaves):
    """A stream closed half-way, and a whole answer not waited for: both are stopped and freed."""
    quiet_again(server, 1.0)
    before = server.metrics()
    for _ in range(5):  # a client that is held up for as long as an answer takes does not leave early
        said = server.metrics()[SAID]
        leaves(server, request(server, words, prompt(40), max_tokens=1900))
        quiet_again(server, before[KV_USE])
        if server.metrics()[SAID] - said < 1900:
            break
    else:
        raise AssertionError("answers go on to their end though nobody listens")

    ids = prompt(23)
    tokens = client.completions.create(**request(server, words, ids)).choices[0].token_ids
    check_greedy(reference, ids, tokens, words)


def test_metrics(server, client, prompt, words):
    client.completions.create(**request(server, words, prompt(5)))
    now = server.metrics()
    for name in (
        RUNNING, WAITING, KV_USE, "vllm:num_preemptions_total", "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total", "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    ):  # fmt: skip
        assert name in now, name
    assert now["vllm:request_success_total"] > 0
