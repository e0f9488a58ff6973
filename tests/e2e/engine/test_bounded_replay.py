# SPDX-License-Identifier: Apache-2.0
"""Bounded replay through the host's scheduler: every token the reference's under the same approximation."""

import pytest

from tests.e2e.engine.harness import EXACT_BOUND, TIE, ask, random_prompt, random_prompts
from tests.e2e.engine.oracle import drafting, runner_of
from tests.e2e.engine.recorder import recording
from tests.reference import Replay

BLOCK, WINDOW, KEEP = 8, 8, 13


def options(mode: str, **more) -> dict:
    """Engine options: the host's replay of hits, and `mode` behind the last KV source."""
    return {
        "swa_bounded_replay": True, "block_size": BLOCK,
        "additional_config": {"dsv41": {"exact": True, "decoder_replay": mode, "keep_tokens": KEEP}},
    } | more


class Chain:
    """Runs of the reference, one for each life of a request, each on top of what an earlier one cached."""

    def __init__(self, reference, mode: str):
        self.reference, self.mode = reference, mode

    def run(self, ids: list[int], life, cached: dict):
        """Reference run over `ids` for a worker's `Life` whose hit came from a run that published `cached`."""
        hit = life.replay_start + WINDOW if life.replay_start else 0
        replay = Replay(life.replay_start, hit, {k: v for k, v in cached.items()}) if hit else None
        start = 0 if self.mode == "off" else max(len(life.prefill) - KEEP, 0)
        return self.reference.run(ids, replay=replay, decoder_start=start)

    def check(self, request, lives, cached: dict) -> dict:
        """Tokens and logprobs of `request`, life by life; returns what its last life published."""
        prompt, output = list(request.prompt_token_ids), request.outputs[0]
        said = list(output.token_ids)
        image = self.reference.config.image_token_id
        if image in said:  # random weights may say one; the reference reads text only
            said = said[: said.index(image)]
            lives = [life for life in lives if len(life.prefill) <= len(prompt) + len(said)]
        ends = [len(life.prefill) for life in lives[1:]] + [len(prompt) + len(said)]
        for life, end in zip(lives, ends, strict=True):
            ids = (prompt + said)[:end]
            assert life.prefill == ids[: len(life.prefill)]
            run = self.run(ids, life, cached)
            rows = (run.hidden @ self.reference.weights.matrix("head").T).log_softmax(-1)
            for at in range(len(life.prefill), len(ids)):
                row, token = rows[at - 1 - run.start], ids[at]
                where = f"prompt of {len(prompt)}, replay from {life.replay_start}, token {at - len(prompt)}"
                assert float(row.max() - row[token]) < TIE, f"{where}: {token}, reference {int(row.argmax())}"
                got = output.logprobs[at - len(prompt)][token].logprob
                assert abs(got - float(row[token])) < EXACT_BOUND, f"{where}: logprob off by {abs(got - float(row[token]))}"
            cached = run.published
        return cached


@pytest.mark.parametrize(("mode", "k"), [("off", 0), ("mask", 0), ("compact", 0), ("compact", 3)])
def test_hits(engines, reference, run_rng, mode, k):
    """Hits at every block of a prompt, 32 of them in one step, then second turns on top of those."""
    llm = engines(**options(mode), **(drafting(k) if k else {}))
    chain = Chain(reference, mode)
    first = random_prompt(run_rng, reference, 9 * BLOCK + 3)
    with recording(llm) as record:
        cold, = ask(llm, [first], max_tokens=4)
    assert cold.num_cached_tokens == 0
    published = chain.check(cold, record.lives[record.request_of(first)], {})

    hits = [1 + i % 9 for i in range(32)]
    ends = random_prompts(run_rng, reference, (run_rng.randrange(1, 20) for _ in hits))
    prompts = [first[: n * BLOCK] + end for n, end in zip(hits, ends, strict=True)]
    runner, sizes = runner_of(llm), []
    add = runner.model_state.prepare_attn

    def prepare_attn(batch, *args, **kwargs):
        sizes.append(sum(runner.model_state.replay_start[batch.idx_mapping_np] > 0))
        return add(batch, *args, **kwargs)

    runner.model_state.prepare_attn = prepare_attn
    with recording(llm) as record:
        second = ask(llm, prompts, max_tokens=5)
    del runner.model_state.prepare_attn
    # A hit of no more than the window is computed anew; the others are rewound by the window, together.
    assert max(sizes) >= sum(n > 1 for n in hits) - 4
    turns, caches = [], []
    for n, prompt, request in zip(hits, prompts, second, strict=True):
        life, = record.lives[record.request_of(prompt)]
        assert life.replay_start == (n * BLOCK - WINDOW if n * BLOCK > WINDOW else 0)
        caches.append(chain.check(request, [life], published))
        turns.append(prompt + list(request.outputs[0].token_ids) + random_prompt(run_rng, reference, 3))

    some = run_rng.sample(range(32), 6)
    with recording(llm) as record:
        third = ask(llm, [turns[i] for i in some], max_tokens=3)
    for i, request in zip(some, third, strict=True):
        life, = record.lives[record.request_of(turns[i])]
        if hits[i] * BLOCK > WINDOW:
            assert life.replay_start >= hits[i] * BLOCK - WINDOW
        chain.check(request, [life], caches[i])


@pytest.mark.parametrize("budget", [3, 13])
def test_chunks_end_anywhere(engines, reference, run_rng, budget):
    """Chunks of a few tokens: they end inside the replayed window, before and inside the kept tokens."""
    llm = engines(**options("compact"), max_num_batched_tokens=budget, max_num_seqs=2)
    chain = Chain(reference, "compact")
    first = random_prompt(run_rng, reference, 5 * BLOCK + 1)
    prompts = [first[: n * BLOCK] + random_prompt(run_rng, reference, extra) for n, extra in ((2, 1), (3, 17), (5, 6))]
    published = {}
    for prompt in [first, *prompts]:
        with recording(llm) as record:
            request, = ask(llm, [prompt], max_tokens=3)
        now = chain.check(request, record.lives[record.request_of(prompt)], published)
        published = published or now


@pytest.mark.parametrize("k", [0, 3])
def test_preemption(engines, reference, run_rng, k):
    """A pool too small: requests come back with their output as part of the prompt, and a hit or none.

    All seven start in the first step with 2 window blocks of 8, 2 compressed ones and 2 of rings: all of the 42 blocks
    beside the null block.  With n tokens a request holds 1 + ceil(n / 8) + 2 at least.  The first to end has 57 of its
    13 + 48 tokens before its last step, as a step says 4 at most, and holds 11.  That step is the 13th, so that those
    never thrown out have 13 + 12 tokens, and hold 7.  There are five in all at most: 11 + 5 * 7 > 42.
    """
    llm = engines(
        **options("compact"), num_gpu_blocks_override=43, max_model_len=96, max_num_batched_tokens=96, max_num_seqs=8,
        **(drafting(k) if k else {}),
    )
    chain = Chain(reference, "compact")
    prompts = random_prompts(run_rng, reference, [13] * 7)
    with recording(llm) as record:
        requests = ask(llm, prompts, max_tokens=48)
    lives = {r: record.lives[record.request_of(p)] for r, p in enumerate(prompts)}
    assert sum(len(life) - 1 for life in lives.values()) >= 2, {r: len(life) for r, life in lives.items()}
    for r, request in enumerate(requests):
        chain.check(request, lives[r], {})


def test_prompt_logprobs_keep_every_row(engines, reference, run_rng):
    llm = engines(**options("compact"))
    prompt = random_prompt(run_rng, reference, 60)
    request, = ask(llm, [prompt], max_tokens=2, prompt_logprobs=0)
    rows = reference.logprobs(prompt + list(request.outputs[0].token_ids)[:1])
    for at in range(1, 60):
        assert abs(request.prompt_logprobs[at][prompt[at]].logprob - float(rows[at - 1, prompt[at]])) < EXACT_BOUND, at
    for step, at in enumerate(range(59, 61)):
        token = request.outputs[0].token_ids[step]
        assert abs(request.outputs[0].logprobs[step][token].logprob - float(rows[at, token])) < EXACT_BOUND
