# SPDX-License-Identifier: Apache-2.0
"""Engram's hash: released constants, folding of tokens, padding, and a plain recomputation."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepseek_v41_plugin.config import ModelConfig
from deepseek_v41_plugin.model.engram_hash import (
    apply_pad,
    column_offsets,
    compressed_vocab,
    multipliers,
    ngram_rows,
)

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def released():
    return ModelConfig.from_hf(json.loads((DATA / "released_config.json").read_text()))


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.getrandbits(64))


def test_released_multipliers(released):
    assert multipliers(released).tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_offsets_fill_the_released_tables(released):
    for primes, rows in zip(released.engram_primes, released.engram_num_embeddings):
        offsets = column_offsets(primes)
        assert offsets.shape == (24,) and offsets[0] == 0
        assert (np.diff(offsets) == np.ravel(primes)[:-1]).all()
        assert offsets[-1] + primes[-1][-1] == rows


def plain_rows(classes, valid, pad, factors, primes, position):
    """The definition, in Python integers."""
    window, dead = [], False
    for back in range(len(factors)):
        at = position - back
        dead = dead or at < 0 or not valid[at]
        window.append(pad if dead else int(classes[at]))
    rows, offset, mixed = [], 0, window[0] * int(factors[0])
    for order in range(1, len(factors)):
        mixed ^= window[order] * int(factors[order])
        for prime in primes[order - 1]:
            rows.append(mixed % prime + offset)
            offset += prime
    return rows


def test_rows_equal_the_definition(released, rng):
    count = 60
    classes = rng.integers(0, 99092, count)
    valid = rng.random(count) > 0.15
    at = np.arange(count)[:, None] - np.arange(4)
    inside = at >= 0
    u = apply_pad(classes[at], inside & valid[at], 7)
    for factors, primes in zip(multipliers(released), released.engram_primes):
        rows = ngram_rows(u, factors, primes)
        assert rows.dtype == np.int64
        assert rows.tolist() == [plain_rows(classes, valid, 7, factors, primes, p) for p in range(count)]


def test_rows_stay_inside_their_columns(released, rng):
    primes = released.engram_primes[1]
    u = rng.integers(0, 99092, (500, 4))
    rows = ngram_rows(u, multipliers(released)[1], primes)
    low = column_offsets(primes)
    assert ((rows >= low) & (rows < low + np.ravel(primes))).all()


def test_an_invalid_position_pads_itself_and_all_older_ones():
    ids = np.array([[1, 2, 3, 4]] * 5)
    valid = np.ones((5, 4), bool)
    for row in range(4):
        valid[row, row] = False
    assert apply_pad(ids, valid, 9).tolist() == [
        [9, 9, 9, 9],
        [1, 9, 9, 9],
        [1, 2, 9, 9],
        [1, 2, 3, 9],
        [1, 2, 3, 4],
    ]


def save_tokenizer(path, tokens, added=()):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in added])
    tokenizer.save(str(path))
    return path


def byte_text(text):
    from tokenizers import pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return level.pre_tokenize_str(text)[0][0]


def test_tokens_that_read_alike_share_a_class(tmp_path):
    groups = [
        ["<|bos|>", "<|BOS|>"],
        ["The", " the", "THE", "the ", "\tthe\n"],
        ["é", "e", "É", " e", "\uff25"],
        [" ", "  ", "\n", " \r\n"],
        ["a b", "a \n b", "A\tB"],
        ["\ufb01x", "fix"],
        ["\u00df"],
        ["\u00b2", "2"],
        ["中"],
    ]
    tokens, expected = [], []
    for number, group in enumerate(groups):
        for text in group:
            tokens.append(text if text.startswith("<|") else byte_text(text))
            expected.append(number)
    partial = [byte_text("中")[0], byte_text("é")[0]]
    tokens += partial
    expected += [len(groups), len(groups) + 1]
    path = save_tokenizer(tmp_path / "tokenizer.json", tokens, ["<|bos|>", "<|BOS|>"])
    classes = compressed_vocab(path, len(tokens) + 5)
    assert classes.dtype == np.int64
    assert classes.tolist() == expected + [0] * 5


def test_text_that_folds_to_nothing_stays_itself(tmp_path):
    tokens = [byte_text(t) for t in ("\u0301", "\u0300", "\u2003", "x")]
    path = save_tokenizer(tmp_path / "tokenizer.json", tokens)
    classes = compressed_vocab(path, 4).tolist()
    assert classes[0] != classes[1] and len(set(classes)) == 4


def test_bad_tokenizers_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="tokenizer.json: not a readable"):
        compressed_vocab(path, 10)
    path.write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json: not a readable"):
        compressed_vocab(path, 10)
    save_tokenizer(path, list("abcdef"))
    with pytest.raises(ValueError, match="6 tokens for a vocab_size of 5"):
        compressed_vocab(path, 5)
