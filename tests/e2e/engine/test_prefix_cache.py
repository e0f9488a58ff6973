# SPDX-License-Identifier: Apache-2.0
"""Requests that begin as an earlier one did: cached rows, and what was never cached (pairs, history)."""

import pytest

from tests.e2e.engine.harness import ask, check_request, random_prompt

BLOCK = 8


@pytest.fixture(scope="module")
def dense(engines):
    """Every block boundary can be hit.  By default the host keeps windows at a few boundaries only."""
    return engines(block_size=BLOCK, prefix_cache_retention_interval=None)


def test_every_shared_length(dense, reference, run_rng):
    """Share k tokens for each k of 0..48: each offset in a block, hits of 0 to 6 blocks."""
    first = random_prompt(run_rng, reference, 6 * BLOCK + 1)
    request, = ask(dense, [first], max_tokens=1)
    assert request.num_cached_tokens == 0
    prompts = []
    for shared in range(6 * BLOCK + 1):
        other = random_prompt(run_rng, reference, run_rng.randrange(1, 12))
        while shared < len(first) and other[0] == first[shared]:
            other[0] = random_prompt(run_rng, reference, 1)[0]
        prompts.append(first[:shared] + other)
    order = run_rng.sample(range(len(prompts)), len(prompts))
    for shared, request in zip(order, ask(dense, [prompts[k] for k in order], max_tokens=3), strict=True):
        assert request.num_cached_tokens == shared // BLOCK * BLOCK
        check_request(reference, request)


def test_full_hits(dense, reference, run_rng):
    """The same prompt again: all but the last token may come from the cache."""
    for length in (BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5):
        prompt = random_prompt(run_rng, reference, length)
        cold, = ask(dense, [prompt], max_tokens=3)
        warm, = ask(dense, [prompt], max_tokens=3)
        assert cold.num_cached_tokens == 0
        assert warm.num_cached_tokens == (length - 1) // BLOCK * BLOCK
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        check_request(reference, warm)


def test_hit_on_generated_tokens(dense, reference, run_rng):
    """A second turn: the first answer is part of the prompt, its rows were written one at a time."""
    answer = [reference.config.image_token_id]
    while reference.config.image_token_id in answer:
        prompt = random_prompt(run_rng, reference, 13)
        first, = ask(dense, [prompt], max_tokens=14)
        answer = list(first.outputs[0].token_ids)
    turn = prompt + answer + random_prompt(run_rng, reference, 5)
    second, = ask(dense, [turn], max_tokens=4)
    assert second.num_cached_tokens > len(prompt)
    check_request(reference, second)


def test_default_retention(engines, reference, run_rng):
    prompt = random_prompt(run_rng, reference, 70)
    ask(engines(), [prompt], max_tokens=1)
    warm, = ask(engines(), [prompt + random_prompt(run_rng, reference, 9)], max_tokens=4)
    assert warm.num_cached_tokens == 64
    check_request(reference, warm)
