# SPDX-License-Identifier: Apache-2.0
"""Engram's n-gram hash: from token ids to rows of the tables.

Follows the hash of the DeepSeek-V4.1 reference: ids are first folded into classes of
strings that read alike, then a layer's n-grams are mixed with odd multipliers and reduced
modulo one prime per n-gram order and head.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..config import ModelConfig

_INT64_MAX = np.iinfo(np.int64).max
# Stands for a lone space while the ends are trimmed; private use, so no text holds it.
_LONE_SPACE = "\ue000"


def _folding():
    """The normaliser under which two tokens count as one."""
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def compressed_vocab(tokenizer_json: str | Path, vocab_size: int) -> np.ndarray:
    """int64 [vocab_size]: the class of each token id, numbered by first appearance.

    A token that holds part of a UTF-8 character is its own class; a text that folds to
    nothing keeps its raw form. Added and special tokens are folded like any other. Ids
    that the tokenizer does not know get class 0 and add no class. Raises ValueError if
    the file is no tokenizer or has ids at or above ``vocab_size``.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as err:
        raise ValueError(
            f"{tokenizer_json}: not a readable tokenizer.json ({type(err).__name__}). "
            "Restore the file that came with the checkpoint."
        ) from None
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    if known > vocab_size:
        raise ValueError(
            f"{tokenizer_json}: {known} tokens for a vocab_size of {vocab_size}. "
            "Use the tokenizer.json that came with the checkpoint."
        )
    folding = _folding()
    classes: dict[str, int] = {}
    result = np.zeros(vocab_size, np.int64)
    for token in range(vocab_size):
        raw = tokenizer.id_to_token(token)
        if raw is None:
            continue
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = raw if "\ufffd" in text else (folding.normalize_str(text) or text)
        result[token] = classes.setdefault(key, len(classes))
    return result


def checked_vocab(cfg: "ModelConfig", tokenizer_json: str | Path) -> np.ndarray:
    """`compressed_vocab`, after checking that it has as many classes as the config says.

    Another tokenizer would hash every n-gram to other rows, without any other sign.
    """
    vocab = compressed_vocab(tokenizer_json, cfg.vocab_size)
    classes = int(vocab.max()) + 1
    if classes != cfg.engram_compressed_vocab_size:
        raise ValueError(
            f"{tokenizer_json}: {classes} classes of tokens, the config's"
            f" text_config.engram_compressed_vocab_size is {cfg.engram_compressed_vocab_size}."
            " Use the tokenizer.json that came with the checkpoint."
        )
    return vocab


def multipliers(cfg: "ModelConfig") -> np.ndarray:
    """int64 [Engram layers, engram_max_ngram_size]: odd factors, newest token first.

    They depend on the layer id and the class count only, and are small enough for a
    product with a class not to overflow.
    """
    bound = max(1, (_INT64_MAX // max(1, cfg.engram_compressed_vocab_size)) // 2)
    rows = [
        np.random.default_rng(10007 * layer).integers(
            0, bound, cfg.engram_max_ngram_size, dtype=np.int64
        )
        for layer in cfg.engram_layer_ids
    ]
    return np.stack(rows) * 2 + 1 if rows else np.zeros((0, 0), np.int64)


def column_offsets(primes) -> np.ndarray:
    """int64 [(ngram - 1) * heads]: first table row of each column, for one layer's
    ``primes[ngram - 1][heads]``."""
    sizes = np.asarray(primes, np.int64).reshape(-1)
    return np.cumsum(sizes) - sizes


def apply_pad(ids: np.ndarray, valid: np.ndarray, pad: int) -> np.ndarray:
    """``ids`` [T, n] (newest first) with ``pad`` from the first invalid entry on.

    ``valid`` is bool [T, n]: False where the position lies before the prompt or holds an
    image token. ``pad`` is the class of engram_pad_token_id. Returns int64 [T, n].
    """
    alive = np.logical_and.accumulate(np.asarray(valid, bool), axis=-1)
    return np.where(alive, np.asarray(ids, np.int64), np.int64(pad))


def ngram_rows(u: np.ndarray, factors: np.ndarray, primes) -> np.ndarray:
    """Table rows of T positions in one layer.

    ``u`` int64 [T, ngram]: classes of p, p-1, ... with padding applied; ``factors`` int64
    [ngram]; ``primes`` [ngram - 1][heads]. Returns int64 [T, (ngram - 1) * heads], column
    offsets included, n-gram order major.
    """
    sizes = np.asarray(primes, np.int64)
    mixed = np.asarray(u, np.int64) * np.asarray(factors, np.int64)
    orders = np.bitwise_xor.accumulate(mixed, axis=-1)[:, 1:]
    # Products and hence their xor are non-negative, so % is the mathematical remainder.
    rows = orders[:, :, None] % sizes[None]
    return rows.reshape(len(rows), -1) + column_offsets(sizes)
