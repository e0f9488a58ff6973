# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions: the prompt that the server builds, thinking, reasoning and content."""

import asyncio

import pytest

from tests.e2e.server.harness import (
    LOGPROB_BOUND,
    bias_of,
    check_greedy,
    literally,
)

BOS, EOS, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
)  # fmt: skip
EFFORT = (
    "<｜System｜>Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the"
    " reasoning)\n\n"
)
QUIET = {"thinking": False}
HI = {"role": "user", "content": "Hi, 東京!"}
YES = {"role": "assistant", "content": "Yes and"}


@pytest.fixture
def rendered(server, words):
    """A function: messages and options -> the text of the prompt that the server builds."""

    def ask(messages, **options):
        return words.decode(server.post("/tokenize", messages=messages, **options)["tokens"])

    return ask


def test_prompt_is_the_v41_encoding(rendered):
    assert rendered([HI]) == f"{BOS}{EFFORT.format(75)}{USER}Hi, 東京!{ASSISTANT}<think>"
    quiet = rendered([HI], chat_template_kwargs=QUIET)
    assert quiet == f"{BOS}{USER}Hi, 東京!{ASSISTANT}</think>"
    for effort, number in (("low", 50), ("max", 100), (7, 7)):
        text = rendered([HI], chat_template_kwargs={"reasoning_effort": effort})
        assert text.startswith(BOS + EFFORT.format(number) + USER)
    parts = [{"type": "text", "text": t} for t in ("one", "two")]
    text = rendered([{"role": "user", "content": parts}], chat_template_kwargs=QUIET)
    assert text == f"{BOS}{USER}one\n\ntwo{ASSISTANT}</think>"
    talk = [{"role": "system", "content": "Be brief."}, HI, YES, {"role": "user", "content": "?"}]
    text = rendered(talk, chat_template_kwargs=QUIET)
    assert text == (
        f"{BOS}<｜System｜>Be brief.{USER}Hi, 東京!{ASSISTANT}</think>Yes and{EOS}"
        f"{USER}?{ASSISTANT}</think>"
    )


def test_tools_and_results_are_encoded_as_the_host_does(rendered):
    from vllm.tokenizers.deepseek_v41_encoding import encode_messages

    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    called = {"name": "f", "arguments": '{"a": [1, "x"]}'}
    call = {"id": "c", "type": "function", "function": called}
    talk = [
        HI,
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    tools = [{"type": "function", "function": function}]
    got = rendered(talk, tools=tools)
    talk[1] = talk[1] | {"reasoning_content": "hm"}
    system = {"role": "system", "content": "", "tools": tools}
    assert got == encode_messages([system, *talk], "thinking", reasoning_effort="high")
    assert '<｜DSML｜ invoke name="f">' in got and "<tool_result>42</tool_result>" in got


def test_no_generation_prompt(rendered):
    text = rendered([HI], add_generation_prompt=False, chat_template_kwargs=QUIET)
    assert text == f"{BOS}{USER}Hi, 東京!"
    text = rendered([HI], add_generation_prompt=False)
    assert text == f"{BOS}{EFFORT.format(75)}{USER}Hi, 東京!"


def test_final_message_is_continued(rendered, client, server):
    options = dict(add_generation_prompt=False, continue_final_message=True)
    text = rendered([HI, YES], chat_template_kwargs=QUIET, **options)
    assert text == f"{BOS}{USER}Hi, 東京!{ASSISTANT}</think>Yes and"
    closed = rendered([HI, YES], chat_template_kwargs=QUIET, add_generation_prompt=False)
    assert closed == text + EOS
    reply = client.chat.completions.create(
        model=server.model, messages=[HI, YES], max_tokens=9, temperature=0,
        extra_body=options | dict(chat_template_kwargs=QUIET, return_token_ids=True,
                                  structured_outputs={"regex": "!{3}"}),
    )  # fmt: skip
    assert reply.choices[0].message.content == "!!!"
    assert server.post("/detokenize", tokens=reply.prompt_token_ids)["prompt"] == text


def test_greedy_and_logprobs(client, server, reference, words, run_rng):
    question = {"role": "user", "content": f"Why {run_rng.getrandbits(32):x}?"}
    body = dict(return_token_ids=True, ignore_eos=True, return_tokens_as_token_ids=True)
    reply = client.chat.completions.create(
        model=server.model, messages=[question], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=2, logit_bias=bias_of(words), extra_body=body,
    )  # fmt: skip
    given, choice = reply.prompt_token_ids, reply.choices[0]
    assert given == server.post("/tokenize", messages=[question])["tokens"]
    told = choice.logprobs.content
    check_greedy(reference, given, choice.token_ids, words, [entry.logprob for entry in told])
    rows = reference.logprobs([*given, *choice.token_ids])[len(given) - 1 :]
    for row, token, entry in zip(rows, choice.token_ids, told):
        assert entry.token == f"token_id:{token}" and len(entry.top_logprobs) == 2
        best = [top.logprob for top in entry.top_logprobs]
        assert best == pytest.approx(row.topk(2).values.tolist(), abs=LOGPROB_BOUND)


def test_thinking_may_be_switched_off(client, server):
    """In the prompt and in the parser: what follows is content at once."""
    body = dict(structured_outputs={"regex": "[xyz]{4}"}, ignore_eos=False)
    for off in ({"thinking": False}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        message = client.chat.completions.create(
            model=server.model, messages=[HI], max_tokens=9, temperature=0,
            extra_body=body | dict(chat_template_kwargs=off),
        ).choices[0].message  # fmt: skip
        assert len(message.content) == 4 and set(message.content) <= set("xyz")
        assert getattr(message, "reasoning", None) is None


def steered(reference, words, rng, encode):
    """(question, bias, ids): with `bias` on </think> the greedy answer is ids, plain text, then </think>."""
    end = words.id("</think>")
    for _ in range(1000):
        question = [{"role": "user", "content": f"{rng.getrandbits(32):x}"}]
        ids, gaps = encode(question), []
        for step in range(9):
            row = reference.logits(ids)[-1]
            row[words.image] -= 100
            gaps.append(float(row.max() - row[end]))
            if step > 1 and 0.1 < gaps[-1] < min(gaps[:-1]) - 0.1:
                return question, (gaps[-1] + min(gaps[:-1])) / 2, ids[len(ids) - step :]
            if (token := int(row.argmax())) not in words.plain:
                break
            ids = [*ids, token]
    raise AssertionError("no question found")


def test_reasoning_ends_at_its_tag(client, server, reference, words, run_rng):
    """The model's own reasoning, then </think>; only what comes after it obeys the grammar."""

    def encode(question):
        return server.post("/tokenize", messages=question)["tokens"]

    question, bias, ids = steered(reference, words, run_rng, encode)
    given = dict(
        model=server.model, messages=question, max_tokens=30, temperature=0,
        logit_bias=bias_of(words) | {str(words.id("</think>")): bias},
        extra_body=dict(structured_outputs={"regex": "[xyz]{4}"}, return_token_ids=True),
    )  # fmt: skip
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.token_ids[: len(ids) + 1] == [*ids, words.id("</think>")]
    assert whole.message.reasoning.strip() == words.decode(ids).strip()
    assert len(whole.message.content) == 4 and set(whole.message.content) <= set("xyz")
    reasoning = content = ""
    for chunk in client.chat.completions.create(**given, stream=True):
        reasoning += getattr(chunk.choices[0].delta, "reasoning", None) or ""
        content += chunk.choices[0].delta.content or ""
    assert (reasoning, content) == (whole.message.reasoning, whole.message.content)


def test_forced_reasoning(server, words):
    """Any text around <think> and </think>, streamed and not."""
    text = "<think>if a < b, é</thin>k</think>so </thin> x"
    given = dict(
        model=server.model, messages=[HI], max_tokens=80, temperature=0,
        logit_bias={str(words.id(tag)): 100 for tag in ("<think>", "</think>")},
        extra_body=dict(structured_outputs={"regex": literally(text)}, chat_template_kwargs=QUIET),
    )  # fmt: skip

    async def streamed(client):
        reasoning = content = ""
        async for chunk in await client.chat.completions.create(**given, stream=True):
            reasoning += getattr(chunk.choices[0].delta, "reasoning", None) or ""
            content += chunk.choices[0].delta.content or ""
        return reasoning, content

    async def both():
        async with server.async_client() as client:
            return await asyncio.gather(
                client.chat.completions.create(**given), streamed(client)
            )

    whole, parts = asyncio.run(both())
    message = whole.choices[0].message
    assert parts == (message.reasoning, message.content) == ("if a < b, é</thin>k", "so </thin> x")
