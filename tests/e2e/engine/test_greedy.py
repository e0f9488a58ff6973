# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding, alone and in company."""

import pytest

from tests.e2e.engine.harness import EXACT_BOUND, ask, check_request, random_prompt

TOKENS = 6


@pytest.fixture(scope="module")
def company(engines, reference, run_seed):
    """32 requests of one batch: from 1 token over several windows of 8 to 25 windows; ratio-2 pairs
    open and closed; more compressed rows than the 4 chosen and than the 8 of the candidate blocks."""
    import random

    rng = random.Random(f"{run_seed} company")
    lengths = [1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 64, 65, 200]
    lengths += [rng.randrange(1, 150) for _ in range(16)]
    rng.shuffle(lengths)
    prompts = [random_prompt(rng, reference, length) for length in lengths]
    return ask(engines(), prompts, max_tokens=TOKENS)


def test_one_prompt(engines, reference, run_rng):
    request, = ask(engines(), [random_prompt(run_rng, reference, 37)], max_tokens=40, prompt_logprobs=0)
    check_request(reference, request)


def test_32_concurrent(company, reference):
    assert len(company) == 32
    for request in company:
        check_request(reference, request)


def test_batch_of_1_equals_batch_of_32(company, engines, run_rng):
    alone = engines(max_num_seqs=1, enable_prefix_caching=False)
    for request in run_rng.sample(company, 8):
        again, = ask(alone, [list(request.prompt_token_ids)], max_tokens=TOKENS)
        mine, theirs = again.outputs[0], request.outputs[0]
        assert mine.token_ids == theirs.token_ids
        for token, a, b in zip(mine.token_ids, mine.logprobs, theirs.logprobs, strict=True):
            assert abs(a[token].logprob - b[token].logprob) < EXACT_BOUND
