# SPDX-License-Identifier: Apache-2.0
"""A KV pool too small for its requests: they are thrown out and computed again."""

import pytest

from tests.e2e.engine.harness import ask, check_request, random_prompts

# All seven start in the first step, of 48 tokens, and none ends before the others have said 30 tokens too.
LENGTHS, TOKENS = (4, 5, 6, 7, 8, 8, 10), 30


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_resume(engines, reference, run_rng, prefix_caching):
    """A request of n tokens holds at least a block of 16 in each of two window groups, one in each of two rings and
    ceil(n / 16) compressed ones.  With 33 tokens (4 and 29 that were fed back) that is 7, so that of 39 blocks (one
    of the 40 is the null block) only five requests hold theirs to the end: two at least are thrown out."""
    llm = engines(
        num_gpu_blocks_override=40, max_model_len=96, max_num_batched_tokens=48, max_num_seqs=8,
        enable_prefix_caching=prefix_caching,
    )
    prompts = random_prompts(run_rng, reference, run_rng.sample(LENGTHS, len(LENGTHS)))
    requests = ask(llm, prompts, max_tokens=TOKENS)
    preemptions = [request.metrics.num_preemptions for request in requests]
    assert sum(preemptions) >= 2, preemptions
    for request in requests:
        check_request(reference, request)
