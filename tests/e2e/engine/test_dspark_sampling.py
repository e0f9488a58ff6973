# SPDX-License-Identifier: Apache-2.0
"""Sampling with drafts draws from the target's distribution, whatever is drafted.

Every token of an answer is drawn from the law that the reference and the request's options give for what was
said before it, also where a draft was accepted or rejected.  So sums over all tokens of (something seen - its
expectation under the law) are martingales of known variance.  Per position the sums are sharper than counts
of whole answers: the laws differ from place to place, and a count would need thousands of answers.

False alarms: the steps of sums of 0 and 1 are at most 1, so by Bernstein's inequality |sum| / deviation > LIMIT
has probability < 3e-7 at a variance of 60, and 1e-10 in the normal limit, which is all that covers the sum of
log probabilities.  A variance below 1 counts as 1: the rarer what is seen, the further from normal its sum.  Power: `test_power` makes the same sums
of answers drawn by wrong rules.
"""

import math
import random

import numpy as np
import pytest
import torch

from tests.e2e.engine.harness import random_prompt, random_prompts
from tests.e2e.engine.oracle import as_asked, drafting, generate, oracle

LIMIT = 6.5
SLACK = 1e-5
# Each adds answers if chance has left something out: once in 1e2 to 1e5 rounds.
ROUNDS = 6
K = 3


class Sum:
    """Seen minus expected, and the variance of that."""

    def __init__(self):
        self.total = self.variance = 0.0

    def add(self, seen: float, mean: float, variance: float) -> None:
        self.total, self.variance = self.total + seen - mean, self.variance + variance

    @property
    def deviations(self) -> float:
        return self.total / math.sqrt(max(self.variance, 1.0))


def law(row, prompt, said, options) -> np.ndarray:
    """The distribution [V] of the next token, from the reference's logits [V], in vLLM's order of steps.

    What top_k and top_p leave out by less than float32 can tell is left in.
    """
    logits = row.double().numpy().copy()
    if "allowed_token_ids" in options:
        kept = np.full_like(logits, -np.inf)
        kept[options["allowed_token_ids"]] = logits[options["allowed_token_ids"]]
        logits = kept
    counts = np.bincount(said, minlength=len(logits))
    known = (counts > 0) | (np.bincount(prompt, minlength=len(logits)) > 0)
    repetition = np.where(known, options.get("repetition_penalty", 1.0), 1.0)
    logits = np.where(logits > 0, logits / repetition, logits * repetition)
    logits -= options.get("frequency_penalty", 0.0) * counts + options.get("presence_penalty", 0.0) * (counts > 0)
    for first, last in options.get("bad_pairs", ()):
        if said and said[-1] == first:
            logits[last] = -np.inf
    logits /= options["temperature"]
    if "top_k" in options:
        logits[logits < np.sort(logits)[-options["top_k"]] - SLACK] = -np.inf
    chance = np.exp(logits - logits.max())
    chance /= chance.sum()
    if "top_p" in options:
        order = np.argsort(-chance, kind="stable")
        before = np.cumsum(chance[order]) - chance[order]
        chance[order[before >= options["top_p"] + SLACK]] = 0
        chance /= chance.sum()
    return chance


def places(reference, request, verdicts, options):
    """For each token of an answer: (law, token, draft or None, index of the draft, verdict or None).

    What follows an image token is left out: the reference reads text only.
    """
    prompt, said = list(request.prompt_token_ids), list(request.outputs[0].token_ids)
    if (image := reference.config.image_token_id) in said:
        said = said[: said.index(image) + 1]
    rows = reference.logits([*prompt, *said[:-1]])[len(prompt) - 1 :]
    tried = {len(v.said) + j: (v.offered[j], j, v) for v in verdicts for j in range(min(v.accepted + 1, v.verified))}
    for t, token in enumerate(said):
        yield law(rows[t], prompt, said[:t], options), token, *tried.get(t, (None, None, None))


def surprise(chance, token) -> tuple[float, float, float]:
    """log of the token's probability, its mean and its variance under the law; -20 stands for impossible."""
    spread = chance[chance > 0]
    mean = (spread * np.log(spread)).sum()
    seen = np.log(chance[token]) if chance[token] > 0 else -20.0
    return seen, mean, (spread * np.log(spread) ** 2).sum() - mean**2


def judge(seen) -> dict[str, Sum]:
    """seen: (law, token, draft or None) of every place; drafts here depend on the past alone, not on chance."""
    sums = {name: Sum() for name in ("best", "surprise", "draft", "after a rejection")}
    for chance, token, draft in seen:
        best = int(chance.argmax())
        sums["best"].add(token == best, chance[best], chance[best] * (1 - chance[best]))
        sums["surprise"].add(*surprise(chance, token))
        if draft is not None:
            p = chance[draft]
            sums["draft"].add(token == draft, p, p * (1 - p))
            if token != draft:
                rest = np.where(np.arange(len(chance)) == draft, 0, chance) / (1 - p)
                p = rest.max()
                sums["after a rejection"].add(token == rest.argmax(), p, p * (1 - p))
    return sums


def check(sums, limit=LIMIT) -> None:
    found = {name: s.deviations for name, s in sums.items()}
    assert all(abs(d) < limit for d in found.values()), found


@pytest.fixture(scope="module")
def sampled(engines, reference, run_seed):
    """[(law, token, draft, index of the draft, verdict)] of 16 answers under three sets of options.

    Three letters may be said; of the drafts nine in ten are one of them, so that about a third is accepted.  If no
    offer at all was accepted whole, or none by as many drafts as another number, there are 16 more.
    """
    rng = random.Random(f"{run_seed} sampling with drafts")
    llm = as_asked(engines, max_model_len=500, async_scheduling=True, **drafting(K))
    tokenizer = llm.get_tokenizer()
    letters = rng.sample("abcdefghijklmnop", 3)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in letters]
    bad = letters[0] + letters[1]
    assert tokenizer.encode(bad, add_special_tokens=False) == ids[:2]
    common = {"temperature": 2.0, "allowed_token_ids": ids}
    kinds = (
        {"temperature": 1.6},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"bad_words": [bad]},
    )

    def offer(prompt, said):
        return [rng.choice(ids) if rng.random() < 0.9 else rng.randrange(500) for _ in range(K)]

    seen = []
    for _ in range(ROUNDS):
        options = [common | kinds[i % 3] | {"max_tokens": 28, "seed": rng.getrandbits(31)} for i in range(16)]
        prompts = random_prompts(rng, reference, (rng.randrange(1, 9) for _ in options))
        with oracle(llm, offer) as account:
            requests = generate(llm, prompts, options)
        for request, given in zip(requests, options, strict=True):
            verdicts = [v for v in account.verdicts if v.prompt == list(request.prompt_token_ids)]
            given = given | {"bad_pairs": [ids[:2]] if "bad_words" in given else []}
            seen += places(reference, request, verdicts, given)
        if accepted(seen) == set(range(K + 1)):
            break
    return seen


def accepted(seen) -> set[int]:
    """How many drafts of an offer were accepted, of the offers met at these places."""
    return {v.accepted for *_, v in seen if v is not None}


def test_offered_drafts(sampled):
    for chance, token, draft, index, verdict in sampled:
        assert chance[token] > 0
        if verdict is not None and index == verdict.accepted:
            assert token != draft, "a rejected draft was drawn again"
    assert accepted(sampled) == set(range(K + 1))
    check(judge(place[:3] for place in sampled))


def draw(rng, chance):
    return rng.choice(len(chance), p=chance)


def half(rng, chance, draft):
    return draft if rng.random() < 1 / 2 and chance[draft] > 0 else draw(rng, chance)


def never(rng, chance, draft):
    rest = np.where(np.arange(len(chance)) == draft, 0, chance)
    return draw(rng, rest / rest.sum())


# Wrong rules: random numbers, the law, the draft -> what would be said.
WRONG = {
    "accept what is possible": lambda rng, chance, draft: draft if chance[draft] > 0 else draw(rng, chance),
    "never accept": never,
    "half too much for the draft": half,
    "no weights": lambda rng, chance, draft: rng.choice(np.flatnonzero(chance)),
}


@pytest.mark.parametrize("rule", WRONG)
def test_power(sampled, run_seed, rule):
    """At the same places, four times over, a wrong rule is found in nearly all of 20 runs; the right one never.

    The worst of 40 checkpoints was 10 deviations off at a third too much for the draft, at the places once.
    """
    rng = np.random.default_rng(run_seed)
    drafted = [(chance, draft) for chance, _, draft, *_ in sampled if draft is not None and chance[draft] < 1]
    found = 0
    for _ in range(20):
        wrong = judge((chance, WRONG[rule](rng, chance, draft), draft) for chance, draft in drafted * 4)
        found += max(abs(s.deviations) for s in wrong.values()) > LIMIT
    assert found > 15
    check(judge((chance, draw(rng, chance), draft) for chance, draft in drafted))


def test_top_k_and_top_p(engines, reference, run_rng):
    """Drafts from the cut support itself, so that many are accepted; 60 tokens a round, of which none may leave it."""
    llm = as_asked(engines, max_model_len=500, async_scheduling=True, **drafting(K))
    kinds = (
        {"temperature": 2.0, "top_k": 3}, {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8},
    )  # fmt: skip
    seen = []

    def offer(prompt, said):
        given, draft = options[prompts.index(prompt)], []
        if reference.config.image_token_id in said:
            return [0] * K
        for _ in range(K):
            chance = law(reference.logits([*prompt, *said, *draft])[-1], prompt, [*said, *draft], given)
            chance[reference.config.image_token_id] = 0
            draft.append(run_rng.choice(np.flatnonzero(chance).tolist() or [0]))
        return draft

    for _ in range(ROUNDS):
        options = [kinds[i % 3] | {"max_tokens": 12, "seed": run_rng.getrandbits(31)} for i in range(5)]
        prompts = random_prompts(run_rng, reference, (run_rng.randrange(1, 6) for _ in options))
        with oracle(llm, offer) as account:
            requests = generate(llm, prompts, options)
        for request, prompt, given in zip(requests, prompts, options, strict=True):
            seen += places(reference, request, [v for v in account.verdicts if v.prompt == prompt], given)
        if accepted(seen) >= {0, 1}:
            break
    assert all(chance[token] > 0 for chance, token, *_ in seen)
    assert accepted(seen) >= {0, 1}
    check(judge(place[:3] for place in seen), limit=8)


@pytest.fixture(scope="module")
def probabilistic(engines):
    options = drafting(K, draft_sample_method="probabilistic")
    return as_asked(engines, max_model_len=500, async_scheduling=True, **options)


def test_drafts_that_are_sampled(probabilistic, reference, run_rng):
    """The draft model samples; it is right only if its own distribution is what the verifier divides by.

    Sums over the tokens that the draft model likes better than the target does: accepting too often raises
    them by the distance of the two distributions, about a half here.
    """
    options = [
        {"temperature": 2.0, "max_tokens": 16, "seed": run_rng.getrandbits(31)} for _ in range(12)
    ]
    prompts = random_prompts(run_rng, reference, (run_rng.randrange(1, 9) for _ in options))
    with oracle(probabilistic, None) as account:
        requests = generate(probabilistic, prompts, options)
    sums = {name: Sum() for name in ("likely", "surprise", "draft's")}
    for request, prompt, given in zip(requests, prompts, options, strict=True):
        verdicts = [v for v in account.verdicts if v.prompt == prompt]
        for chance, token, _, index, verdict in places(reference, request, verdicts, given):
            assert chance[token] > 0
            sums["surprise"].add(*surprise(chance, token))
            likely = chance >= np.median(chance[chance > 0])
            groups = {"likely": likely}
            if verdict is not None:
                draft = torch.softmax(verdict.scores[index].double() / given["temperature"], -1).numpy()
                groups["draft's"] = draft > chance
            for name, group in groups.items():
                p = chance[group].sum()
                sums[name].add(bool(group[token]), p, p * (1 - p))
    assert {v.accepted for v in account.verdicts} > {0}
    assert sums["draft's"].variance > 8
    check(sums, limit=8)


def test_same_seed_same_answer(probabilistic, reference, run_rng):
    """The same requests with the same seeds say the same.  Without drafts a seed says something else: the
    noise that decides between accepting and drawing again has no part in plain sampling."""
    prompts = [random_prompt(run_rng, reference, 7) for _ in range(2)]
    options = [{"temperature": 2.0, "max_tokens": 8, "seed": run_rng.getrandbits(31)} for _ in prompts]
    answers = [[r.outputs[0].token_ids for r in generate(probabilistic, prompts, options)] for _ in range(2)]
    assert answers[0] == answers[1]
    options = [given | {"seed": given["seed"] + 1} for given in options]
    assert [r.outputs[0].token_ids for r in generate(probabilistic, prompts, options)] != answers[0]
