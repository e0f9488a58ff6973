# SPDX-License-Identifier: Apache-2.0
"""The host's V4.1 parser fed in pieces: what it makes of a text does not depend on their sizes."""

import json

import pytest

D = "｜DSML｜"
TEXT = (
    f'<think>a < b</think>so <{D} b\n\n<{D} calls>\n<{D} invoke name="f">\n'
    f'<{D} parameter name="a" string="true"> x <y> é\n</{D} parameter>\n'
    f'<{D} parameter name="b" string="false">[1, {{"c": null}}]</{D} parameter>\n'
    f'</{D} invoke>\n<{D} invoke name="g">\n</{D} invoke>\n</{D} calls>'
)
CALLS = [("f", {"a": " x <y> é\n", "b": [1, {"c": None}]}), ("g", {})]


@pytest.fixture(scope="module")
def parse(checkpoint):
    """A function: lists of token ids, one a delta -> (reasoning, content, calls)."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.deepseek_v41 import DeepSeekV41Parser
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    tokenizer = DeepseekV41Tokenizer.from_pretrained(str(checkpoint))
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], tools=tools)

    def run(deltas):
        parser = DeepSeekV41Parser(
            tokenizer, request.tools, chat_template_kwargs={"thinking": False}
        )
        seen, told, calls = [], "", []
        reasoning = content = ""
        for i, ids in enumerate(deltas):
            seen += ids
            # As the detokenizer does: an unfinished letter waits.
            text = tokenizer.decode(seen, skip_special_tokens=False).rstrip("\ufffd")
            part = parser.parse_delta(
                text[len(told) :], ids, request, finished=i == len(deltas) - 1
            )
            told = text
            if part is None:
                continue
            reasoning, content = reasoning + (part.reasoning or ""), content + (part.content or "")
            for call in part.tool_calls or ():
                if call.index == len(calls):
                    calls.append(["", ""])
                calls[call.index][0] += call.function.name or ""
                calls[call.index][1] += call.function.arguments or ""
        assert told == TEXT
        return reasoning, content, [(name, json.loads(given)) for name, given in calls]

    return run


def spellings(words):
    """TEXT in ids: the tags as tokens, and |DSML| in bytes."""
    ids, marker = words.encode(TEXT), words.id(D)
    yield ids
    loose = [words.encode(letter) for letter in D]
    yield sum((sum(loose, []) if i == marker else [i] for i in ids), [])


def test_any_cut_gives_the_same(parse, words, run_rng):
    wanted = ("a < b", f"so <{D} b\n\n", CALLS)
    for ids in spellings(words):
        assert parse([ids]) == wanted
        assert parse([[i] for i in ids]) == wanted
        for at in range(1, len(ids)):
            assert parse([ids[:at], ids[at:]]) == wanted, at
        for _ in range(100):
            cuts = sorted(run_rng.sample(range(1, len(ids)), run_rng.randrange(2, 40)))
            pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]
            assert parse(pieces) == wanted, cuts
