# SPDX-License-Identifier: Apache-2.0
"""Structured output: every kind of grammar, greedy and sampled, streamed and not."""

import asyncio
import json
import re

import pytest

from tests.e2e.server.harness import bias_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "ok": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "ok", "list"],
    "additionalProperties": False,
}
GRAMMAR = """root ::= term (("+" | "-") term)? "=" [0-9]
term ::= [0-9] | "(" [a-c] [a-c] ")"
"""
TERM = r"([0-9]|\([a-c]{2}\))"


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "ok", "list"}
        and re.fullmatch("[A-Z]{2}", value["name"]) is not None
        and isinstance(value["ok"], bool)
        and 1 <= len(value["list"]) <= 2
        and set(value["list"]) <= {1, 2, 30}
    )


# Kind -> (options of the request, what the answer must satisfy).
KINDS = {
    "schema": (
        {"response_format": {
            "type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA},
        }},
        fits_schema,
    ),
    "regex": (
        {"structured_outputs": {"regex": "[a-c]{3}-(0[1-9]|1[0-2])é"}},
        lambda text: re.fullmatch("[a-c]{3}-(0[1-9]|1[0-2])é", text),
    ),
    "EBNF": (
        {"structured_outputs": {"grammar": GRAMMAR}},
        lambda text: re.fullmatch(f"{TERM}([-+]{TERM})?=[0-9]", text),
    ),
    "choice": (
        {"structured_outputs": {"choice": ["Yes, of course", "Yes, 東京", "No"]}},
        lambda text: text in ("Yes, of course", "Yes, 東京", "No"),
    ),
}


@pytest.fixture(scope="module")
def answers(server, words):
    """(kind, temperature, streamed) -> text; all are asked at once."""
    # JSON admits white space without end, of which a random model makes use.
    bias = bias_of(words) | {str(i): -100 for i in words.blanks()}

    async def ask(client, kind, temperature, streamed):
        given = dict(
            model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=120,
            temperature=temperature, seed=3, logit_bias=bias,
            extra_body=KINDS[kind][0] | {"chat_template_kwargs": {"thinking": False}},
        )  # fmt: skip
        if not streamed:
            return (await client.chat.completions.create(**given)).choices[0].message.content
        text = ""
        async for chunk in await client.chat.completions.create(**given, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def everything():
        keys = [(k, t, s) for k in KINDS for t in (0, 1) for s in (False, True)]
        async with server.async_client() as client:
            texts = await asyncio.gather(*(ask(client, *key) for key in keys))
        return dict(zip(keys, texts, strict=True))

    return asyncio.run(everything())


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_answer_obeys(answers, kind, temperature):
    whole, streamed = answers[kind, temperature, False], answers[kind, temperature, True]
    assert KINDS[kind][1](whole), whole
    assert streamed == whole


def test_the_mask_leaves_the_models_choice(client, server, reference, words, prompt):
    """Among the allowed tokens the likeliest wins. </think> first: before it, no grammar holds."""
    letters = "qxz"
    given = [*prompt(20), words.id("</think>")]
    reply = client.completions.create(
        model=server.model, prompt=given, max_tokens=2, temperature=0,
        extra_body=dict(structured_outputs={"choice": list(letters)}, return_token_ids=True),
    ).choices[0]  # fmt: skip
    row = reference.logits(given)[-1]
    assert reply.text == max(letters, key=lambda letter: float(row[words.id(letter)]))
    assert reply.finish_reason == "stop"


STOPS = {  # name -> (options, text, finish_reason, stop_reason); the answer would be "tsrqpnm"
    "spanning tokens": ({"stop": ["zz", "rqp"]}, "ts", "rqp"),
    "included": (
        {"stop": ["rqp"], "extra_body": {"include_stop_str_in_output": True}}, "tsrqp", "rqp",
    ),
    "no match": ({"stop": ["rqn"]}, "tsrqpnm", None),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_stop_strings(client, server, name):
    options, text, reason = STOPS[name]
    extra = dict(structured_outputs={"regex": "tsrqpnm"}, chat_template_kwargs={"thinking": False})
    given = dict(
        model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=20,
        temperature=0, **options | {"extra_body": extra | options.get("extra_body", {})},
    )  # fmt: skip
    choice = client.chat.completions.create(**given).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    assert choice.stop_reason == reason
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**given, stream=True)
    )
    assert streamed == text
