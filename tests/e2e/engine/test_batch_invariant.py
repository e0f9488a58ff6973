# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant mode in the dtype that users run: drafts and company change no bit of tokens and logprobs."""

import random

import pytest

from tests.e2e.engine.harness import random_prompts
from tests.e2e.engine.oracle import Corrupted, as_asked, drafting, generate, oracle

K = 2
TOKENS = 4
# The prompts' chunks differ from run to run: 64 prompts share a step's budget with what is decoded and drafted.
INVARIANT = {
    "dtype": "bfloat16", "additional_config": {"dsv41": {"batch_invariant": True}}, "max_num_seqs": 64,
    "max_num_batched_tokens": 100, "max_model_len": 96, "enable_prefix_caching": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(reference, run_seed):
    rng = random.Random(f"{run_seed} batch invariant")
    return random_prompts(rng, reference, [1, 9, 40] + [rng.randrange(1, 5) for _ in range(61)])


def said(llm, prompts, tokens: int) -> dict[tuple, tuple[list[int], list[float]]]:
    """prompt -> (tokens, logprobs), all prompts submitted at once."""
    answers = {}
    for prompt, request in zip(prompts, generate(llm, prompts, [{"max_tokens": tokens}] * len(prompts)), strict=True):
        ids = list(request.outputs[0].token_ids)
        answers[tuple(prompt)] = ids, [at[t].logprob for at, t in zip(request.outputs[0].logprobs, ids, strict=True)]
    return answers


@pytest.fixture(scope="module")
def plain(engines, prompts):
    """64 requests at once, without drafts; K tokens more than are asked for with drafts."""
    return said(engines(**INVARIANT), prompts, TOKENS + K)


def cut(answer):
    return tuple(part[:TOKENS] for part in answer)


def test_alone(engines, prompts, plain):
    for prompt in prompts[:3]:
        assert said(engines(**INVARIANT), [prompt], TOKENS)[tuple(prompt)] == cut(plain[tuple(prompt)])


def test_drafts(engines, reference, prompts, plain, run_rng):
    """Right and spoilt drafts, at 64 requests and at 1."""
    llm = as_asked(engines, async_scheduling=True, **INVARIANT, **drafting(K))
    truth = {prompt: tokens for prompt, (tokens, _) in plain.items()}
    for batch in (prompts, *([prompt] for prompt in prompts[1:3])):
        with oracle(llm, Corrupted(run_rng, truth, reference.config.vocab_size, K)) as account:
            answers = said(llm, batch, TOKENS)
        for prompt in batch:
            assert answers[tuple(prompt)] == cut(plain[tuple(prompt)])
        if batch is prompts:
            assert {verdict.accepted for verdict in account.verdicts} == set(range(K + 1))
