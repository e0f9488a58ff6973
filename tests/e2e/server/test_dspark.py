# SPDX-License-Identifier: Apache-2.0
"""A server that drafts: free text, grammars, what it refuses, and what it tells of its drafts."""

import json

import openai
import pytest

from tests.e2e.server.conftest import FLAGS
from tests.e2e.server.harness import check_greedy, serving
from tests.e2e.server.test_structured import KINDS


@pytest.fixture(scope="module")
def drafting(checkpoint, tmp_path_factory):
    config = json.dumps({"method": "dspark", "num_speculative_tokens": 3})
    with serving(
        checkpoint, tmp_path_factory.mktemp("log") / "drafting.log", *FLAGS, "--speculative-config", config,
        # JSON admits white space without end, of which a random model makes use.
        "--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
    ) as running:  # fmt: skip
        yield running


def test_free_text(drafting, reference, words, prompt):
    """The host refuses logit_bias with drafts; the image token is left out of those allowed."""
    prompts = [prompt(length) for length in (1, 9, 40)]
    text = [i for i in range(reference.config.vocab_size) if i != words.image]
    reply = drafting.client().completions.create(
        model=drafting.model, prompt=prompts, max_tokens=8, temperature=0, logprobs=0,
        extra_body=dict(return_token_ids=True, ignore_eos=True, allowed_token_ids=text),
    )  # fmt: skip
    for given, choice in zip(prompts, reply.choices, strict=True):
        assert len(choice.token_ids) == 8
        check_greedy(reference, given, choice.token_ids, words, choice.logprobs.token_logprobs)
    counted = drafting.metrics()
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == 3 * counted["vllm:spec_decode_num_drafts_total"] > 0


@pytest.mark.parametrize("option", ["logit_bias", "min_p"])
def test_refused_options(drafting, option):
    value = {"logit_bias": {"5": 1.0}} if option == "logit_bias" else {"extra_body": {"min_p": 0.5}}
    with pytest.raises(openai.BadRequestError, match=option):
        drafting.client().completions.create(model=drafting.model, prompt=[5], max_tokens=2, temperature=1, **value)


@pytest.mark.parametrize("kind", KINDS)
def test_grammar(drafting, kind):
    """Greedy and sampled answers obey it.  Among the drafts, few do."""
    for temperature in (0, 1):
        text = drafting.client().chat.completions.create(
            model=drafting.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=60,
            temperature=temperature, seed=3, extra_body=KINDS[kind][0] | {"chat_template_kwargs": {"thinking": False}},
        ).choices[0].message.content  # fmt: skip
        assert KINDS[kind][1](text), text
