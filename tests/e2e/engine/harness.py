# SPDX-License-Identifier: Apache-2.0
"""Engines inside the test process, and the comparison of what they say with the reference."""

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

# Float64 all the way to the logits; the host then works in float32.  Logits and logprobs of the
# tiny checkpoint stay within 40, where float32's step is 4e-6 at most (2e-6 below 32), and a logprob
# takes two such roundings (logit, logsumexp).  Measured: 4e-7 on likely tokens, 2e-6 on unlikely ones.
EXACT_BOUND = 1e-5
# Two logits this close may be equal in float32, and then either is the greedy token.
TIE = 4e-6

EXACT = {
    "dtype": "float32",
    "additional_config": {"dsv41": {"exact": True}},
    "max_model_len": 512,
    "block_size": 16,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 16 << 20,
    "gpu_memory_utilization": 0.05,  # several engines share one GPU; on a CPU the line above decides
    "enforce_eager": True,
    "swa_bounded_replay": False,  # an approximation, with tests of its own
    "disable_log_stats": False,
}


class Engines:
    """LLM objects by their options, each started once (the first in 4 s, later ones in 0.2 s).

    All live until the end: the first one to go would take the process groups of the others along.
    """

    def __init__(self, checkpoint: Path):
        self.checkpoint, self._running = checkpoint, {}

    def __call__(self, **options):
        """An engine with `options` over those of EXACT."""
        key = repr(sorted(options.items()))
        if key not in self._running:
            from vllm import LLM

            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
                patch.setenv("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
                self._running[key] = LLM(model=str(self.checkpoint), **EXACT | options)
        return self._running[key]

    def close(self) -> None:
        """One shutdown ends the process groups, which all engines share; the rest is memory."""
        if self._running:
            _, llm = self._running.popitem()
            llm.llm_engine.engine_core.shutdown()


def random_prompt(rng: random.Random, reference, length: int) -> list[int]:
    """Any ids but the image token's, special ones included."""
    ids = [i for i in range(reference.config.vocab_size) if i != reference.config.image_token_id]
    return rng.choices(ids, k=length)


def random_prompts(rng: random.Random, reference, lengths: Iterable[int]) -> list[list[int]]:
    """Random prompts of these lengths, no two the same: tests know a request by its prompt."""
    prompts = []
    for length in lengths:
        prompt = random_prompt(rng, reference, length)
        while prompt in prompts:
            prompt = random_prompt(rng, reference, length)
        prompts.append(prompt)
    return prompts


def ask(llm, prompts: list[list[int]], **sampling):
    """RequestOutputs for token prompts, all submitted at once; greedy unless told otherwise."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "logprobs": 0, "ignore_eos": True} | sampling)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def check_tokens(reference, prompt, tokens, logprobs, greedy=True, bound=EXACT_BOUND) -> None:
    """`tokens` are the reference's own greedy ones, `logprobs` the reference's within `bound`.

    What follows an image token is left out: random weights may say one, the reference reads text only.
    """
    tokens, image = list(tokens), reference.config.image_token_id
    if image in tokens:
        tokens = tokens[: tokens.index(image) + 1]
        logprobs = logprobs[: len(tokens)]
    rows = reference.logprobs([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    for step, (token, logprob, row) in enumerate(zip(tokens, logprobs, rows, strict=True)):
        where = f"prompt of {len(prompt)}, output token {step}"
        if greedy and token != int(row.argmax()):
            best = int(row.argmax())
            assert row[best] - row[token] < TIE, f"{where}: {token}, reference {best}"
        difference = abs(logprob - float(row[token]))
        assert difference < bound, f"{where}: logprob off by {difference}"


def check_request(reference, request, greedy=True, bound=EXACT_BOUND) -> None:
    """`check_tokens` for each completion of a RequestOutput; its prompt's logprobs if it has them."""
    prompt = list(request.prompt_token_ids)
    for completion in request.outputs:
        logprobs = [at[t].logprob for at, t in zip(completion.logprobs, completion.token_ids, strict=True)]
        check_tokens(reference, prompt, completion.token_ids, logprobs, greedy, bound)
    if request.prompt_logprobs is not None:
        rows = reference.logprobs(prompt)
        for position in range(1, len(prompt)):
            token = prompt[position]
            got, want = request.prompt_logprobs[position][token].logprob, float(rows[position - 1, token])
            assert abs(got - want) < bound, f"prompt position {position} of {len(prompt)}: {got}, reference {want}"
