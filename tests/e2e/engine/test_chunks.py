# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill: state must cross a chunk's edge wherever it falls."""

import pytest

from tests.e2e.engine.harness import ask, check_request, random_prompt


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 13, 33])
def test_odd_chunks(engines, reference, run_rng, budget):
    """A step's `budget` of tokens is shared, so that chunks begin at odd and even positions, in and
    out of step with blocks (16), windows (8) and pairs (2).  Every prompt position is compared."""
    llm = engines(max_num_batched_tokens=budget, max_num_seqs=min(4, budget))
    lengths = [21, 12] if budget < 5 else [70, 45, 29, 18, 3]
    prompts = [random_prompt(run_rng, reference, length) for length in lengths]
    for request in ask(llm, prompts, max_tokens=4, prompt_logprobs=0):
        check_request(reference, request)
