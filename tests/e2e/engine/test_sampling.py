# SPDX-License-Identifier: Apache-2.0
"""Seeded sampling of several outputs from one prompt."""

from tests.e2e.engine.harness import ask, check_request, random_prompt


def test_four_seeded_outputs(engines, reference, run_rng):
    prompt = random_prompt(run_rng, reference, 27)
    sampling = dict(n=4, temperature=1.5, seed=run_rng.randrange(1 << 30), max_tokens=20)
    first, = ask(engines(), [prompt], **sampling)
    again, = ask(engines(), [prompt], **sampling)
    drawn = [completion.token_ids for completion in first.outputs]
    assert drawn == [completion.token_ids for completion in again.outputs]
    assert len({tuple(tokens) for tokens in drawn}) == 4
    check_request(reference, first, greedy=False)
    check_request(reference, again, greedy=False)
