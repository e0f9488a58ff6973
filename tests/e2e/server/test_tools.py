# SPDX-License-Identifier: Apache-2.0
"""Tool calls in DSML, forced letter by letter: parsed exactly, none of it in the content."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest

from tests.e2e.server.harness import literally

D = "｜DSML｜"
TOOLS = [
    {"type": "function", "function": {
        "name": name, "description": "d", "parameters": {
            "type": "object", "properties": {key: kind}, "required": [key],
            "additionalProperties": False,
        },
    }}
    for name, key, kind in (
        ("f", "a", {"type": "string", "enum": ["Rome", "Oslo"]}), ("g", "o", {"type": "object"}),
    )
]  # fmt: skip


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    inner = "".join(
        f'<{D} parameter name="{key}" string="{is_text}">{value}</{D} parameter>\n'
        for key, is_text, value in parameters
    )
    return f'<{D} invoke name="{name}">\n{inner}</{D} invoke>\n'


def block(*calls: str) -> str:
    return f"<{D} calls>\n{''.join(calls)}</{D} calls>"


ODD = '<b> "é" {\n </'
ONE = block(invoke("f", ("a", "true", ODD)))
TWO = block(
    invoke("f", ("a", "true", "x")), invoke("g", ("o", "false", '{"k": [-1]}'))
)
TWO_CALLS = [("f", {"a": "x"}), ("g", {"o": {"k": [-1]}})]
# Name -> (what the model says, |DSML| as one token or as bytes, reasoning, content, calls).
CASES = {
    "after a near miss": (f"a <{D} b\n\n{ONE}", "token", "", f"a <{D} b", [("f", {"a": ODD})]),
    "two after thinking": (f"<think>hm</think>so\n\n{TWO}", "token", "hm", "so", TWO_CALLS),
    "in bytes": (ONE, "bytes", "", "", [("f", {"a": ODD})]),
}
HOW = [(name, streamed) for name in CASES for streamed in (False, True)]
HOW.remove(("in bytes", False))
HOW.remove(("after a near miss", True))
CUTS = (14, 40)  # tokens: behind the opening tag, whose own beginning might be text; in a parameter


@dataclass
class Heard:
    """What a client has got, streamed or not."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    pieces: int = 0
    chunks: int = 0
    finish: str | None = None

    def add(self, part) -> None:
        self.reasoning += getattr(part, "reasoning", None) or ""
        self.content += part.content or ""
        for i, call in enumerate(part.tool_calls or []):
            index = i if getattr(call, "index", None) is None else call.index
            if index == len(self.calls):
                assert call.id and call.type == "function"
                self.calls.append(["", ""])
            self.calls[index][0] += call.function.name or ""
            self.calls[index][1] += call.function.arguments or ""
            self.pieces += 1


@pytest.fixture(scope="module")
def heard(server, words):
    """(case, streamed) -> Heard, and cut -> Heard. All are asked at once and served together."""
    marker, tags = str(words.id(D)), [str(words.id(t)) for t in ("<think>", "</think>")]

    async def ask(client, text, spelling, streamed, max_tokens=300):
        given = dict(
            model=server.model, messages=[{"role": "user", "content": "Hi"}], tools=TOOLS,
            max_tokens=max_tokens, temperature=0,
            logit_bias={marker: 100 if spelling == "token" else -100, **dict.fromkeys(tags, 100)},
            extra_body=dict(structured_outputs={"regex": literally(text)},
                            chat_template_kwargs={"thinking": False}),
        )  # fmt: skip
        got = Heard()
        if streamed:
            async for chunk in await client.chat.completions.create(**given, stream=True):
                for choice in chunk.choices:
                    got.chunks += 1
                    got.add(choice.delta)
                    got.finish = choice.finish_reason or got.finish
        else:
            choice = (await client.chat.completions.create(**given)).choices[0]
            got.add(choice.message)
            got.finish = choice.finish_reason
        return got

    async def everything():
        async with server.async_client() as client:
            asked = [ask(client, *CASES[name][:2], streamed) for name, streamed in HOW]
            asked += [ask(client, f"ok{ONE}", "token", False, cut) for cut in CUTS]
            return dict(zip([*HOW, *CUTS], await asyncio.gather(*asked), strict=True))

    return asyncio.run(everything())


@pytest.mark.parametrize("name, streamed", HOW)
def test_call_is_parsed(heard, name, streamed):
    got = heard[name, streamed]
    *_, reasoning, content, calls = CASES[name]
    assert (got.reasoning, got.content.rstrip("\n")) == (reasoning, content)
    assert [(call, json.loads(arguments)) for call, arguments in got.calls] == calls
    assert got.finish == "tool_calls"
    if streamed and got.chunks > 10:  # if the server's front was held up, all it says is one chunk
        assert got.pieces > len(calls), "the arguments came in one piece"


@pytest.mark.parametrize("cut", CUTS)
def test_cut_off_call_leaks_nothing(heard, cut):
    # The host says "tool_calls" once a call has a name, even if its end was cut off.
    assert heard[cut].content == "ok" and heard[cut].finish in ("length", "tool_calls")


def test_named_tool_is_forced(heard, client, server, words):
    """tool_choice names a function: the host's own grammar makes the random model call it."""
    function = TOOLS[0]["function"] | {"strict": True}
    choice = client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Hi"}], temperature=0,
        tools=[{"type": "function", "function": function}], max_tokens=150,
        tool_choice={"type": "function", "function": {"name": "f"}},
        logit_bias={str(i): -100 for i in words.blanks()} | {str(words.id(D)): 100},
        extra_body={"chat_template_kwargs": {"thinking": False}},
    ).choices[0]  # fmt: skip
    assert not choice.message.content, choice.message.content
    (call,) = choice.message.tool_calls
    assert call.function.name == "f"
    assert json.loads(call.function.arguments) in ({"a": "Rome"}, {"a": "Oslo"})
