# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding with drafts says what it says without: whatever is drafted, however much of it is accepted."""

import random

import pytest

from tests.e2e.engine.harness import ask, check_request, random_prompt, random_prompts
from tests.e2e.engine.oracle import Corrupted, as_asked, drafting, generate, oracle, runner_of

K = 3
TOKENS = 6


def said(requests) -> list[list[int]]:
    return [list(request.outputs[0].token_ids) for request in requests]


@pytest.fixture(scope="module")
def plain(engines):
    """A function: prompts, tokens -> prompt -> that many tokens and K more, said by an engine without drafts."""

    def greedy(prompts, tokens):
        requests = ask(engines(), prompts, max_tokens=tokens + K)
        return {tuple(p): answer for p, answer in zip(prompts, said(requests), strict=True)}

    return greedy


def counts(llm) -> dict[str, list[int]]:
    """Counters of drafting of the engine that was started last."""
    prefix = "vllm:spec_decode_num_"
    metrics = {m.name.removeprefix(prefix): m for m in llm.get_metrics() if m.name.startswith(prefix)}
    return {name: list(m.values) if hasattr(m, "values") else [m.value] for name, m in metrics.items()}


@pytest.fixture(scope="module")
def company(engines, reference, plain, run_seed):
    """(truth, requests, account, drafter, counters before and after): 32 requests, each of its own length of
    answer, so that the batch shrinks from 32 to 1."""
    rng = random.Random(f"{run_seed} company with drafts")
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 90] + [rng.randrange(1, 40) for _ in range(21)]
    prompts = random_prompts(rng, reference, lengths)
    truth = plain(prompts, TOKENS)
    # Started last, and so the one whose counters the host shows.
    llm = as_asked(engines, max_model_len=499, async_scheduling=True, **drafting(K))
    drafter = Corrupted(rng, truth, reference.config.vocab_size, K)
    before = counts(llm)
    with oracle(llm, drafter) as account:
        requests = generate(llm, prompts, [{"max_tokens": 1 + i % TOKENS} for i in range(len(prompts))])
    return truth, requests, account, drafter, before, counts(llm)


def test_any_number_accepted(company, reference):
    """Tokens of the plain engine, logprobs of the reference; as many drafts accepted as are right."""
    truth, requests, account, drafter, *_ = company
    for request in requests:
        answer = list(request.outputs[0].token_ids)
        assert answer == truth[tuple(request.prompt_token_ids)][: len(answer)]
        check_request(reference, request)
    assert {v.accepted for v in account.verdicts} == set(range(K + 1))
    for verdict in account.verdicts:
        assert verdict.verified == K
        assert verdict.accepted == drafter.agreement(verdict), verdict


def test_counters(company):
    truth, requests, account, _, before, after = company
    lengths = {tuple(r.prompt_token_ids): len(r.outputs[0].token_ids) for r in requests}
    live = [v for v in account.verdicts if len(v.said) < lengths[tuple(v.prompt)]]
    change = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after}
    assert change["accepted_tokens_per_pos"] == account.accepted_per_position(K, lengths)
    assert change["accepted_tokens"] == [sum(v.accepted for v in live)]
    assert change["drafts"] == [len(live)]
    assert change["draft_tokens"] == [K * len(live)]


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_own_drafts(engines, reference, plain, run_rng, scheduling):
    """What the draft model itself says; prompts that hit nothing, then a second turn of each."""
    llm = as_asked(
        engines, block_size=8, prefix_cache_retention_interval=None, async_scheduling=scheduling == "async",
        **drafting(K),
    )  # fmt: skip
    config = runner_of(llm).vllm_config
    assert config.scheduler_config.async_scheduling == (scheduling == "async")
    prompts = random_prompts(run_rng, reference, (30, 7))
    truth = plain(prompts, 14)
    with oracle(llm, None) as account:
        first = ask(llm, prompts, max_tokens=14)
    assert account.verdicts
    assert said(first) == [truth[tuple(p)][:14] for p in prompts]
    # The second turn finds what was said in the cache, written by rows some of which were rejected.
    turns = [[*p, *truth[tuple(p)][:14], *random_prompt(run_rng, reference, 3)] for p in prompts]
    with oracle(llm, Corrupted(run_rng, plain(turns, 5), reference.config.vocab_size, K)):
        second = ask(llm, turns, max_tokens=5)
    for prompt, request in zip(prompts, second, strict=True):
        assert request.num_cached_tokens > len(prompt)
    for request in first + second:
        check_request(reference, request)


@pytest.mark.parametrize(("k", "budget"), [(1, 7), (2, 13)])
def test_odd_chunks(engines, reference, plain, run_rng, k, budget):
    """Prompts in odd pieces beside requests that decode, fewer drafts than the checkpoint's block."""
    llm = as_asked(engines, max_num_batched_tokens=budget, max_num_seqs=3, async_scheduling=k == 2, **drafting(k))
    prompts = random_prompts(run_rng, reference, (3, 45, 18))
    drafter = Corrupted(run_rng, plain(prompts, 8), reference.config.vocab_size, k)
    with oracle(llm, drafter) as account:
        requests = ask(llm, prompts, max_tokens=8)
    assert {v.accepted for v in account.verdicts} >= {0, k}
    for request in requests:
        check_request(reference, request)


@pytest.fixture(scope="module")
def small(engines):
    """Few blocks, short sequences: 35 of the 36 blocks can be used, the other is the null block."""
    return as_asked(
        engines, num_gpu_blocks_override=36, max_model_len=96, max_num_batched_tokens=48, max_num_seqs=8,
        async_scheduling=True, **drafting(K),
    )  # fmt: skip


def test_preempted_requests_resume(small, reference, plain, run_rng):
    """All seven start in the first step, of 48 tokens, each with a block of 16 in each of five groups (13 tokens and
    3 drafts at most), and the pool is full: the first that needs a 17th place, while none has ended, throws one out."""
    prompts = random_prompts(run_rng, reference, run_rng.sample((3, 4, 5, 6, 8, 9, 13), 7))
    drafter = Corrupted(run_rng, plain(prompts, 18), reference.config.vocab_size, K)
    with oracle(small, drafter):
        requests = ask(small, prompts, max_tokens=18)
    assert sum(request.metrics.num_preemptions for request in requests) >= 1
    for request in requests:
        check_request(reference, request)


def test_longest_sequence(small, reference, plain, run_rng):
    """A sequence ends at max_model_len, wherever in a block of accepted drafts that is."""
    prompts = random_prompts(run_rng, reference, (96 - left for left in (1, 2, 3, 4, 6)))
    truth = plain(prompts, 6)
    with oracle(small, lambda prompt, known: (truth[tuple(prompt)][len(known) :] + [0] * K)[:K]):
        requests = ask(small, prompts, max_tokens=50)
    for request in requests:
        output = request.outputs[0]
        assert output.finish_reason == "length"
        assert len(request.prompt_token_ids) + len(output.token_ids) == 96
        check_request(reference, request)


def test_stops_inside_accepted_drafts(engines, reference, plain, run_rng):
    """All drafts are right: what lies behind the end of an answer was accepted too, and is not said."""
    llm = as_asked(engines, max_model_len=500, async_scheduling=True, **drafting(K))
    eos, vocab = llm.get_tokenizer().eos_token_id, reference.config.vocab_size
    prompts = random_prompts(run_rng, reference, [5] * 8)
    truth = plain(prompts, 8)
    ends = [{"max_tokens": n} for n in (2, 3, 4)]
    ends += [{"max_tokens": 8, "stop_token_ids": [truth[tuple(p)][n]]} for n, p in enumerate(prompts[3:6], 1)]
    # Only one token may be said before the two that end an answer are allowed.
    few = {"max_tokens": 8, "ignore_eos": False, "stop_token_ids": [11], "allowed_token_ids": [eos, 11]}
    ends += [few | {"min_tokens": n, "allowed_token_ids": [eos, 11, run_rng.randrange(20, 200)]} for n in (2, 3)]
    expected = [r.outputs[0] for r in generate(engines(), prompts, ends)]
    for prompt, output in list(zip(prompts, expected, strict=True))[6:]:
        truth[tuple(prompt)] = list(output.token_ids) + [run_rng.randrange(vocab)] * K
    with oracle(llm, lambda prompt, known: (truth[tuple(prompt)][len(known) :] + [0] * K)[:K]) as account:
        requests = generate(llm, prompts, ends)
    assert any(v.accepted == K for v in account.verdicts)
    for request, wanted, end in zip(requests, expected, ends, strict=True):
        output = request.outputs[0]
        assert list(output.token_ids) == list(wanted.token_ids), end
        assert (output.finish_reason, output.stop_reason) == (wanted.finish_reason, wanted.stop_reason), end
        assert end.get("min_tokens", 0) <= len(output.token_ids) <= end["max_tokens"]
        if output.finish_reason == "length":
            assert len(output.token_ids) == end["max_tokens"]
        else:  # a token that ends an answer may come at max_tokens, too
            assert output.token_ids[-1] in (*end.get("stop_token_ids", ()), *(() if end.get("ignore_eos", True) else (eos,)))
