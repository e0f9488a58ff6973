# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be served get one clear answer, and the server goes on."""

import base64
import io
import json

import openai
import pytest

from tests.e2e.server.harness import bias_of, check_greedy


def refusal(call, **given) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as caught:
        call(**given)
    return caught.value.status_code, caught.value.body["message"]


@pytest.fixture(autouse=True)
def goes_on(client, server, prompt, reference, words):
    """After each test here the server still answers, and right."""
    yield
    ids = prompt(9)
    reply = client.completions.create(
        model=server.model, prompt=ids, max_tokens=1, temperature=0, logit_bias=bias_of(words),
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    check_greedy(reference, ids, reply.choices[0].token_ids, words)


def test_over_long_prompt(client, server):
    for call, given in (
        (client.completions.create, {"prompt": [5] * 2100}),
        (client.chat.completions.create, {"messages": [{"role": "user", "content": "x" * 2100}]}),
    ):
        status, message = refusal(call, model=server.model, max_tokens=1, **given)
        assert status == 400
        assert "maximum context length is 2048 tokens" in message and "\n" not in message


BAD = [
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 2}),
    ("max_tokens", {"max_tokens": -1}),
    ("n must be", {"n": 0}),
    ("logprobs", {"logprobs": 100}),
    ("presence_penalty", {"presence_penalty": 9}),
    ("stop cannot contain an empty string", {"stop": [""]}),
    ("logit_bias", {"logit_bias": {"99999": 1}}),
    ("600 is out of vocabulary", {"prompt": [600]}),
    ("at least one prompt", {"prompt": []}),
    ("regex", {"extra_body": {"structured_outputs": {"regex": "(("}}}),
    ("one kind", {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}),
]


def test_bad_parameters(client, server):
    for named, given in BAD:
        given = dict(model=server.model, prompt=[5, 6], max_tokens=1) | given
        status, message = refusal(client.completions.create, **given)
        assert status == 400 and named in message, (named, message)


def test_bad_chats(client, server):
    hi = {"role": "user", "content": "Hi"}
    schema = {"name": "s", "schema": {"type": "nope"}}
    for named, given in (
        ("Invalid role: alien", {"messages": [{"role": "alien", "content": "x"}]}),
        ("reasoning_effort", {"extra_body": {"chat_template_kwargs": {"reasoning_effort": 101}}}),
        ("nope", {"response_format": {"type": "json_schema", "json_schema": schema}}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ):
        given = dict(model=server.model, messages=[hi], max_tokens=1) | given
        status, message = refusal(client.chat.completions.create, **given)
        assert status == 400 and named in message, (named, message)


def picture() -> str:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (42, 42), "red").save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


@pytest.fixture
def talk_with_image():
    part = {"type": "image_url", "image_url": {"url": picture()}}
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]


def test_image(client, server, talk_with_image):
    call = client.chat.completions.create
    status, message = refusal(call, model=server.model, messages=talk_with_image, max_tokens=1)
    assert status == 400 and "\n" not in message, message


def test_image_is_named(client, server, talk_with_image):
    call = client.chat.completions.create
    _, message = refusal(call, model=server.model, messages=talk_with_image, max_tokens=1)
    assert "image" in message.lower().replace(server.model, ""), message


def test_unknown_model(client):
    status, message = refusal(client.completions.create, model="nobody", prompt="x", max_tokens=1)
    assert status == 404 and "`nobody` does not exist" in message


def test_models_and_version(client, server):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (server.model, 2048)
    assert json.loads(server.get("/version"))["version"]
