# SPDX-License-Identifier: Apache-2.0
"""Drafts of the tests' own making in place of the draft model's, and an account of what became of them."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

# A drafter: (prompt, tokens said since) -> the tokens it expects next, as many as the engine drafts.
Offer = Callable[[list[int], list[int]], list[int]]


def drafting(k: int = 3, **more) -> dict:
    """Options of an engine that drafts k tokens; `more`: further options of speculative_config."""
    return {"speculative_config": {"method": "dspark", "num_speculative_tokens": k} | more}


def as_asked(engines, **options):
    """An engine with `options`, of which vLLM's CPU platform would turn async scheduling off."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # the plugin wraps this check too, and its wrapper must outlive ours
    original = CpuPlatform.check_and_update_config

    def check(config):
        asked = config.scheduler_config.async_scheduling
        original(config)
        config.scheduler_config.async_scheduling = asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check))
        return engines(**options)


def generate(llm, prompts: list[list[int]], options: list[dict]):
    """RequestOutputs of prompts, each with its own options, all submitted at once; greedy unless told otherwise."""
    from vllm import SamplingParams

    params = [SamplingParams(**{"temperature": 0, "logprobs": 0, "ignore_eos": True} | given) for given in options]
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def runner_of(llm):
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@dataclass
class Verdict:
    """One verified offer: `said` tokens of output were known when it was made."""

    request: str
    prompt: list[int]
    said: list[int]
    offered: list[int]
    verified: int
    accepted: int
    scores: torch.Tensor | None  # float32 [k, vocab]: the draft model's logits, if its drafts were sampled


@dataclass
class Account:
    """`verdicts` in the order they fell; `passes` of the draft model in which a request was sampled from."""

    verdicts: list[Verdict] = field(default_factory=list)
    passes: int = 0

    def accepted_per_position(self, k: int, lengths: dict[tuple, int]) -> list[int]:
        """How often each draft position was accepted.

        lengths: output tokens by prompt.  Async scheduling verifies once more after a request's last token,
        which nobody counts.
        """
        live = [v for v in self.verdicts if len(v.said) < lengths[tuple(v.prompt)]]
        return [sum(v.accepted > i for v in live) for i in range(k)]


@contextmanager
def oracle(llm, offer: Offer | None) -> Iterator[Account]:
    """For the length of the context, `llm` verifies what `offer` says.  None: the draft model's own drafts.

    The draft pass still runs, with its writes to the caches.  The runner keeps one tensor of drafts: what
    `propose` returns is stored by request, fed to the next step and handed to the scheduler.
    """
    runner, account = runner_of(llm), Account()
    speculator, states = runner.speculator, runner.req_states
    original, open_offers = speculator.propose, {}

    def propose(input_batch, metadata, slots, hidden, features, num_sampled, num_rejected, *args, **kwargs):
        drafts = original(input_batch, metadata, slots, hidden, features, num_sampled, num_rejected, *args, **kwargs)
        account.passes += bool((num_sampled > 0).any())
        for i, name in enumerate(input_batch.req_ids):
            sampled = int(num_sampled[i])
            if not sampled:  # in the middle of a prompt: these drafts are not verified
                continue
            slot = int(input_batch.idx_mapping[i])
            tokens = states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()
            cut = int(states.prompt_len.np[slot])
            prompt, said = tokens[:cut], tokens[cut:]
            verified = sampled + int(num_rejected[i]) - 1
            if (before := open_offers.pop(name, None)) is not None and len(before[0]) == len(said) - sampled:
                known, offered, scores = before
                account.verdicts.append(Verdict(name, prompt, known, offered, verified, sampled - 1, scores))
            if offer is not None:
                drafts[i] = torch.tensor(offer(prompt, said), dtype=drafts.dtype)
            scores = None if speculator.draft_logits is None else speculator.draft_logits[slot].clone()
            open_offers[name] = said, drafts[i].tolist(), scores
        return drafts

    speculator.propose = propose
    try:
        yield account
    finally:
        del speculator.propose


class Corrupted:
    """Offers known continuations, each spoilt at one of the k positions or, as often as at any one, at none.

    k + 1 offers on end for a prompt cover all of these, and so do the first offers for k + 1 prompts on end.
    What follows the spoilt token is the known continuation again: tempting to whoever looks further.
    truth: prompt -> what greedy decoding says, k tokens longer than what is asked for.
    """

    def __init__(self, rng: random.Random, truth: dict[tuple, list[int]], vocab: int, k: int = 3):
        self.rng, self.truth, self.vocab, self.k = rng, truth, vocab, k
        self.order, self.turns = rng.sample(range(k + 1), k + 1), {}

    def __call__(self, prompt: list[int], said: list[int]) -> list[int]:
        known = self.truth[tuple(prompt)][len(said) : len(said) + self.k]
        draft = known + [self.rng.randrange(self.vocab) for _ in range(self.k - len(known))]
        turn = self.turns.setdefault(tuple(prompt), len(self.turns))
        self.turns[tuple(prompt)] += 1
        spoilt = self.order[turn % (self.k + 1)]
        if spoilt < self.k:
            draft[spoilt] = (draft[spoilt] + self.rng.randrange(1, self.vocab)) % self.vocab
        return draft

    def agreement(self, verdict: Verdict) -> int:
        """Drafts of an offer that greedy decoding would say too, of those that were verified."""
        known = self.truth[tuple(verdict.prompt)][len(verdict.said) :]
        count = 0
        for mine, true in zip(verdict.offered[: verdict.verified], known, strict=False):
            if mine != true:
                break
            count += 1
        return count
