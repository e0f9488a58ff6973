# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer with DeepSeek-V4.1's special tokens and every id in use."""

import itertools
import json
from pathlib import Path

from ..config_fields import shorten

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
NOISE = "<｜place▁holder▁no▁0｜>"
# Skipped when text is decoded; the tokens below them are text to the parsers.
HIDDEN = (BOS, EOS, PAD, IMAGE, NOISE)
MARKERS = (
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)


def byte_letters() -> list[str]:
    """The printable stand-in of each byte value in byte-level BPE (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = itertools.count(0x100)
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def _pieces():
    """Short text pieces in spellings that fold together: "ba", " ba", "Ba", "BA", ..."""
    for vowel, consonant in itertools.product("aeiou", "bcdfghjklmnpqrstvwxz"):
        for piece in (consonant + vowel, vowel + consonant):
            yield from (piece, f"\u0120{piece}", piece.title(), piece.upper())


def token_list(vocab_size: int) -> list[str]:
    """Tokens by id: bos, eos, pad, 256 bytes, special tokens, then pieces.

    The pieces are never produced by encoding, but every id that a model can emit decodes.
    Raises ValueError unless 277 <= vocab_size <= 1077.
    """
    fixed = [BOS, EOS, PAD, *byte_letters(), IMAGE, NOISE, *MARKERS]
    tokens = fixed + list(_pieces())
    if not len(fixed) <= vocab_size <= len(tokens):
        raise ValueError(
            f"vocab_size: {shorten(vocab_size)} is not between {len(fixed)} and {len(tokens)}. "
            "Choose one of a preset."
        )
    return tokens[:vocab_size]


def write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> dict[str, int]:
    """tokenizer.json and tokenizer_config.json in ``folder``; returns token -> id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(token_list(vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in HIDDEN])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return vocab
