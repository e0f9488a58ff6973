# SPDX-License-Identifier: Apache-2.0
"""The drafts themselves: at every step of the engine those of the reference, whatever came before."""

import pytest

from tests.e2e.engine.harness import ask, check_request, random_prompt, random_prompts
from tests.e2e.engine.oracle import Corrupted, drafting, oracle
from tests.e2e.engine.recorder import recording
from tests.reference import ReferenceDraft

# The Markov sums of the host are float32: two logits this close may change places.
TIE = 1e-4
BLOCK = 8


@pytest.fixture(scope="module")
def draft(reference):
    return ReferenceDraft(reference)


def check_drafts(draft, record, requests, k: int, least: int) -> int:
    """Proposals of all `requests` along the tokens they came to say; returns how many were compared."""
    compared = 0
    for request in requests:
        prompt = list(request.prompt_token_ids)
        full, name = prompt + list(request.outputs[0].token_ids), record.request_of(prompt)
        features = draft.features(full)
        for proposal in record.proposals:
            at = proposal.position
            if proposal.request != name or at >= len(full):
                continue
            want = draft.propose(full[:at], full[at], features=features[:at], k=k, drafts=proposal.tokens)
            for i, token in enumerate(proposal.tokens):
                best = want.tokens[i]
                lead = float(want.logits[i, best] - want.logits[i, token])
                assert lead < TIE, f"prompt of {len(prompt)}, draft {i} behind position {at}: {token}, reference {best}"
            compared += 1
    assert compared >= least, compared
    return compared


@pytest.mark.parametrize("k", [1, 3])
def test_drafts_of_fresh_prompts(engines, reference, draft, run_rng, k):
    prompts = random_prompts(run_rng, reference, (1, 2, 7, 8, 9, 15, 31, 60))
    llm = engines(**drafting(k))
    with recording(llm) as record:
        requests = ask(llm, prompts, max_tokens=6)
    check_drafts(draft, record, requests, k, least=3 * len(prompts))


def test_drafts_after_accepted_and_rejected_ones(engines, reference, draft, run_rng):
    """Every accepted length 0 to 3 before the draft that is looked at: the first 6 offers for a prompt at least are
    verified, as 24 tokens need 6 of them."""
    prompts = random_prompts(run_rng, reference, (5, 12, 33))
    truth = {tuple(p): list(r.outputs[0].token_ids) for p, r in zip(prompts, ask(engines(), prompts, max_tokens=30), strict=True)}
    llm = engines(**drafting(3))
    # The oracle's offers take the place of what the recorder saw.
    with recording(llm) as record, oracle(llm, Corrupted(run_rng, truth, reference.config.vocab_size)) as account:
        requests = ask(llm, prompts, max_tokens=24)
    assert {v.accepted for v in account.verdicts} == {0, 1, 2, 3}
    for request in requests:
        check_request(reference, request)
    check_drafts(draft, record, requests, 3, least=15)


@pytest.mark.parametrize("budget", [7, 13])
def test_drafts_after_chunked_prefill(engines, reference, draft, run_rng, budget):
    llm = engines(max_num_batched_tokens=budget, max_num_seqs=1, **drafting(3))
    prompts = random_prompts(run_rng, reference, (30, 21, 8))
    with recording(llm) as record:
        requests = ask(llm, prompts, max_tokens=5)
    check_drafts(draft, record, requests, 3, least=6)


def test_drafts_after_prefix_hits(engines, reference, draft, run_rng):
    """The draft's context comes from the cache too.  With drafts vLLM 0.32 gives up a hit's last block."""
    llm = engines(block_size=BLOCK, prefix_cache_retention_interval=None, **drafting(3))
    first = random_prompt(run_rng, reference, 7 * BLOCK + 1)
    ask(llm, [first], max_tokens=1)
    prompts = [first[: n * BLOCK] + random_prompt(run_rng, reference, run_rng.randrange(1, 12)) for n in range(2, 8)]
    with recording(llm) as record:
        requests = ask(llm, prompts, max_tokens=5)
    lost = 7 * BLOCK - requests[-1].num_cached_tokens
    assert lost in (0, BLOCK)
    assert [r.num_cached_tokens for r in requests] == [n * BLOCK - lost for n in range(2, 8)]
    check_drafts(draft, record, requests, 3, least=12)


def test_drafts_after_preemption(engines, reference, draft, run_rng):
    """All seven start in the first step, of 64 tokens, each with a block of 16 in each of five groups (13 tokens and
    3 drafts at most).  These fill the pool but for its null block: the first that needs a 17th place, while none has
    ended, throws one out."""
    llm = engines(num_gpu_blocks_override=36, max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, **drafting(3))
    prompts = random_prompts(run_rng, reference, run_rng.sample((4, 5, 7, 9, 13, 13, 13), 7))
    with recording(llm) as record:
        requests = ask(llm, prompts, max_tokens=30)
    assert max(len(lives) for lives in record.lives.values()) > 1
    for request in requests:
        check_request(reference, request)
    check_drafts(draft, record, requests, 3, least=60)
