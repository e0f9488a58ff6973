# SPDX-License-Identifier: Apache-2.0
"""/v1/completions against the float64 reference."""

import pytest

from tests.e2e.server.harness import LOGPROB_BOUND, bias_of, check_greedy


@pytest.fixture
def ask(client, server, words):
    """Greedy by default; image token kept out; token ids told."""

    def send(prompt, max_tokens=6, extra_body=None, **more):
        given = dict(temperature=0, logit_bias=bias_of(words)) | more
        extra = dict(return_token_ids=True, ignore_eos=True, return_tokens_as_token_ids=True)
        return client.completions.create(
            model=server.model, prompt=prompt, max_tokens=max_tokens,
            extra_body=extra | (extra_body or {}), **given,
        )  # fmt: skip

    return send


def number(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def test_greedy_tokens_and_logprobs(ask, prompt, reference, words):
    prompts = [prompt(length) for length in (1, 2, 9, 40, 77)]
    reply = ask(prompts, logprobs=3)
    assert [choice.index for choice in reply.choices] == list(range(len(prompts)))
    for given, choice in zip(prompts, reply.choices, strict=True):
        tokens, told = choice.token_ids, choice.logprobs
        check_greedy(reference, given, tokens, words, told.token_logprobs)
        assert [number(t) for t in told.tokens] == tokens and choice.finish_reason == "length"
        rows = reference.logprobs([*given, *tokens])[len(given) - 1 :]
        for row, token, top in zip(rows, tokens, told.top_logprobs):
            assert len(top) in (3, 4)
            best = sorted(top.values(), reverse=True)[:3]
            assert best == pytest.approx(row.topk(3).values.tolist(), abs=LOGPROB_BOUND)
            for name, value in top.items():
                assert value == pytest.approx(float(row[number(name)]), abs=LOGPROB_BOUND)
    assert reply.usage.prompt_tokens == sum(map(len, prompts))
    assert reply.usage.completion_tokens == 6 * len(prompts)


def test_streaming_equals_not_streaming(ask, prompt):
    given = prompt(33)
    whole = ask(given, logprobs=1)
    text, tokens, logprobs, usage = "", [], [], None
    for chunk in ask(given, logprobs=1, stream=True, stream_options={"include_usage": True}):
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.text
            tokens += choice.token_ids or []
            logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
    one = whole.choices[0]
    assert (text, tokens) == (one.text, one.token_ids)
    assert logprobs == pytest.approx(one.logprobs.token_logprobs, abs=1e-6)
    assert usage.completion_tokens == 6 and usage.total_tokens == whole.usage.total_tokens


def test_prompt_logprobs_and_echo(ask, prompt, reference, words):
    given = prompt(21)
    known = reference.logprobs(given)
    reply = ask(given, max_tokens=2, extra_body={"prompt_logprobs": 1}).choices[0]
    check_greedy(reference, given, reply.token_ids, words)
    assert reply.prompt_logprobs[0] is None
    for i, entry in enumerate(reply.prompt_logprobs[1:]):
        mine = entry[str(given[i + 1])]["logprob"]
        assert mine == pytest.approx(float(known[i, given[i + 1]]), abs=LOGPROB_BOUND)


def test_echo(ask, reference, words):
    """The prompt's text and logprobs come before the answer's (not if token ids are asked for)."""
    text = "Echo: naïve 42"
    given = words.encode(text)
    known = reference.logprobs(given)
    body = {"return_token_ids": False}
    reply = ask(text, max_tokens=8, echo=True, logprobs=1, extra_body=body).choices[0]
    tokens = [number(t) for t in reply.logprobs.tokens]
    assert tokens[: len(given)] == given and len(tokens) == len(given) + 8
    check_greedy(reference, given, tokens[len(given) :], words)
    assert reply.text.startswith(text)
    shown = [words.decode([i]) for i in tokens[len(given) :] if i in words.plain]
    assert all(piece in reply.text[len(text) :] for piece in shown if piece.isascii())  # others may be parts of letters
    told = reply.logprobs.token_logprobs
    want = [float(known[i, given[i + 1]]) for i in range(len(given) - 1)]
    assert told[0] is None and told[1 : len(given)] == pytest.approx(want, abs=LOGPROB_BOUND)


def test_n_and_seed(ask, prompt, reference):
    given = prompt(18)
    first, second, other = (
        ask(given, n=4, seed=seed, max_tokens=16, temperature=2.0, logprobs=0).choices for seed in (7, 7, 8)
    )
    drawn = [choice.token_ids for choice in first]
    assert drawn == [choice.token_ids for choice in second]
    assert drawn != [choice.token_ids for choice in other]
    assert len({tuple(tokens) for tokens in drawn}) > 1
    for choice in first:
        rows = reference.logprobs([*given, *choice.token_ids])[len(given) - 1 :]
        for row, token, told in zip(rows, choice.token_ids, choice.logprobs.token_logprobs):
            assert told == pytest.approx(float(row[token]), abs=LOGPROB_BOUND)


def test_text_prompt_is_the_same_as_its_ids(ask, words):
    text = "Grüße an 東京, naïve <b>! "
    by_text, by_ids = ask(text), ask(words.encode(text))
    assert by_text.choices[0].prompt_token_ids == words.encode(text)
    assert by_text.choices[0].token_ids == by_ids.choices[0].token_ids


def test_stop_token(ask, prompt):
    given = prompt(15)
    free = ask(given).choices[0]
    end = free.token_ids[2]
    length = free.token_ids.index(end)
    cut = ask(given, extra_body={"stop_token_ids": [end]}).choices[0]
    assert cut.token_ids == free.token_ids[: length + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", end)
    assert free.text.startswith(cut.text)
