# SPDX-License-Identifier: Apache-2.0
"""Structured output with drafts: every verified row is masked, whatever is drafted, and greedy answers stay."""

import json
import re
from collections import Counter

import pytest

from tests.e2e.engine.harness import random_prompts
from tests.e2e.engine.oracle import Corrupted, as_asked, drafting, generate, oracle

K = 3
CHOICES = ["yes, sir", "yes, dear", "no", "nobody"]
PLACES = [a + b + "-" + c for a in "ab" for b in "xyz" for c in ("01", "10", "12")]
SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 20, 300]}},
    "required": ["ok", "n"], "additionalProperties": False,
}  # fmt: skip
# Kind -> (constraint, every text it admits, or None for too many).
KINDS = {
    "choice": ({"choice": CHOICES}, CHOICES),
    "regex": ({"regex": "[ab][xyz]-(01|1[02])"}, PLACES),
    "schema": ({"json": SCHEMA}, None),
    "free": (None, None),
}
# JSON admits white space without end, of which a random model makes use.
COMPACT = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


class Language:
    """Which token may follow in a finite set of texts, by trying each of them."""

    def __init__(self, texts: list[str], tokenizer, special: set[int], eos: int):
        self.texts, self.eos = texts, eos
        self.words = {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in special}

    def allowed(self, said: list[int]) -> set[int]:
        if not self.words.keys() >= set(said):  # the answer has ended
            return set()
        text = "".join(self.words[i] for i in said)
        fits = {i for i, word in self.words.items() if word and any(t.startswith(text + word) for t in self.texts)}
        return fits | ({self.eos} if text in self.texts else set())


@pytest.fixture
def rows(monkeypatch):
    """[(prompt, tokens of output and drafts before the row, ids the row leaves possible)] of verified rows."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    seen, original = [], RejectionSampler.__call__

    def verify(self, logits, batch, *args):
        states, fed = self.sampler.req_states, batch.input_ids[batch.logits_indices].tolist()
        bounds = batch.cu_num_logits.tolist()
        for slot, low, high in zip(batch.idx_mapping.tolist(), bounds, bounds[1:], strict=False):
            known = states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()
            cut = int(states.prompt_len.np[slot])
            for row in range(low, high):
                possible = {int(i) for i in (logits[row] > float("-inf")).nonzero()}
                seen.append((tuple(known[:cut]), known[cut:] + fed[low + 1 : row + 1], possible))
        return original(self, logits, batch, *args)

    monkeypatch.setattr(RejectionSampler, "__call__", verify)
    return seen


class Forbidden(Corrupted):
    """Spoils with a token that no grammar here admits, every second time for a prompt."""

    def __init__(self, *args):
        super().__init__(*args)
        self.spoilt = Counter()

    def __call__(self, prompt, said):
        draft, known = super().__call__(prompt, said), self.truth[tuple(prompt)][len(said) :]
        for i, (mine, true) in enumerate(zip(draft, known, strict=False)):
            if mine != true:
                self.spoilt[tuple(prompt)] += 1
                if self.spoilt[tuple(prompt)] % 2:
                    draft[i] = 0  # begin of sentence
        return draft


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_masks_and_answers(engines, reference, run_rng, rows, scheduling):
    from vllm.sampling_params import StructuredOutputsParams

    llm = as_asked(engines, async_scheduling=scheduling == "async", **COMPACT, **drafting(K))
    tokenizer = llm.get_tokenizer()
    eos, vocab = tokenizer.eos_token_id, reference.config.vocab_size
    special = {int(i) for i in tokenizer.added_tokens_decoder}
    languages = {kind: Language(texts, tokenizer, special, eos) for kind, (_, texts) in KINDS.items() if texts}

    def text(output) -> str:
        # The host's own text may begin with the rest of a character of the prompt.
        return tokenizer.decode([i for i in output.token_ids if i != eos])

    kinds = [*KINDS, "choice", "regex"]
    prompts = random_prompts(run_rng, reference, (run_rng.randrange(1, 12) for _ in kinds))

    def options():
        return [
            {"max_tokens": 24 if kind != "free" else 9, "ignore_eos": False}
            | ({"structured_outputs": StructuredOutputsParams(**KINDS[kind][0])} if KINDS[kind][0] else {})
            for kind in kinds
        ]

    plain = [r.outputs[0] for r in generate(engines(**COMPACT), prompts, options())]
    truth = {tuple(p): list(output.token_ids) for p, output in zip(prompts, plain, strict=True)}
    with oracle(llm, Forbidden(run_rng, truth, vocab, K)) as account:
        answers = [r.outputs[0] for r in generate(llm, prompts, options())]

    # The first four offers for the schema, whose answer is longer than what they can reach, are all of them.
    assert any(0 in v.offered for v in account.verdicts) and any(v.accepted == K for v in account.verdicts)
    for kind, without, output in zip(kinds, plain, answers, strict=True):
        assert list(output.token_ids) == list(without.token_ids), kind
        assert output.finish_reason == without.finish_reason
        if kind in languages:
            assert text(output) in languages[kind].texts
    fields = json.loads(text(answers[kinds.index("schema")]))
    assert isinstance(fields["ok"], bool) and fields["n"] in (1, 20, 300)

    checked = set()
    for prompt, before, possible in rows:
        kind = kinds[prompts.index(list(prompt))]
        if kind == "free":
            assert len(possible) == vocab
        elif kind in languages and all(t in languages[kind].allowed(before[:i]) for i, t in enumerate(before)):
            allowed = languages[kind].allowed(before)
            if allowed:  # after the end, nothing is said
                assert possible == allowed, (kind, before)
                checked.add(len(before))
    assert len(checked) > 2


def test_regex_is_the_list():
    assert all(re.fullmatch(KINDS["regex"][0]["regex"], text) for text in PLACES)
