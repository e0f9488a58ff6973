# SPDX-License-Identifier: Apache-2.0
"""A KV pool too small for its requests: they are thrown out and computed again."""

import pytest

from tests.e2e.engine.harness import ask, check_request, random_prompt


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_resume(engines, reference, run_rng, prefix_caching):
    llm = engines(
        num_gpu_blocks_override=40, max_model_len=96, max_num_batched_tokens=48, max_num_seqs=8,
        enable_prefix_caching=prefix_caching,
    )
    prompts = [random_prompt(run_rng, reference, run_rng.randrange(5, 30)) for _ in range(7)]
    requests = ask(llm, prompts, max_tokens=30)
    preemptions = [request.metrics.num_preemptions for request in requests]
    assert sum(preemptions) >= 2, preemptions
    for request in requests:
        check_request(reference, request)
