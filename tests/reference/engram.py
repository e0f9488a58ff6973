# SPDX-License-Identifier: Apache-2.0
"""Engram: n-gram hashes of the tokens pick rows of a table (facts 6)."""

import re
import unicodedata
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

_LONE_SPACE = "\ue000"
_REPLACEMENT = "\ufffd"  # what a decoder writes for a partial UTF-8 character


def normalise(text: str) -> str:
    """NFKC, NFD, no combining marks, lower case, single spaces, trimmed; a lone space survives."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(ch for ch in text if not unicodedata.category(ch).startswith("M"))
    text = "".join(ch.lower() for ch in text)  # by character: no final sigma rule
    text = re.sub(r"[ \t\r\n]+", " ", text)
    text = _LONE_SPACE if text == " " else text
    return _trim(text).replace(_LONE_SPACE, " ")


def _trim(text: str) -> str:
    # Unicode White_Space; Python's strip() also takes U+001C..U+001F, which are not in it.
    white = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
    return text.strip(white + "".join(map(chr, range(0x2000, 0x200B))))


def compressed_ids(directory: str | Path, vocab_size: int) -> tuple[list[int], int]:
    """(class of every token id, number of classes), classes numbered by first appearance.

    Ids that the tokenizer does not know decode to the empty string and share one class, which
    is not counted: it only exists where the embedding is longer than the vocabulary.
    """
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    classes: dict[str, int] = {}
    ids, known = [], 0
    for token in range(vocab_size):
        raw = tokenizer.id_to_token(token)
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = raw if raw is not None and _REPLACEMENT in text else normalise(text) or text
        ids.append(classes.setdefault(key, len(classes)))
        known = len(classes) if raw is not None else known
    return ids, known


def multipliers(layer: int, max_ngram: int, compressed_vocab: int) -> list[int]:
    """One odd multiplier per lookback 0..max_ngram-1 of this layer."""
    bound = (np.iinfo(np.int64).max // compressed_vocab) // 2
    draws = np.random.default_rng(10007 * layer).integers(0, bound, max_ngram, dtype=np.int64)
    return [int(d) * 2 + 1 for d in draws]


def _is_prime(n: int) -> bool:
    if n < 4:
        return n in (2, 3)
    return n % 2 == 1 and all(n % d for d in range(3, int(n**0.5) + 1, 2))


def primes(layers: int, orders: int, heads: int, start: int) -> list[list[list[int]]]:
    """[layer][order][head], ascending from ``start``, none used twice."""

    def walk():
        n = start
        while True:
            if _is_prime(n):
                yield n
            n += 1

    p = walk()
    return [[[next(p) for _ in range(heads)] for _ in range(orders)] for _ in range(layers)]


class Engram:
    """Hash rows and injection of every Engram layer of one checkpoint."""

    def __init__(self, config, directory, weights):
        self.c, self.weights = config, weights
        self.class_of, self.class_count = compressed_ids(directory, config.vocab_size)
        if self.class_count > config.engram_compressed_vocab_size:
            raise ValueError(
                f"engram_compressed_vocab_size: tokenizer.json has {self.class_count} classes, "
                f"the config says {config.engram_compressed_vocab_size}. Correct the config"
            )
        orders = config.engram_max_ngram_size - 1
        self.primes = primes(
            len(config.engram_layer_ids), orders, config.engram_n_heads, config.engram_vocab_size
        )
        for layer, total in zip(self.primes, config.engram_num_embeddings, strict=True):
            if sum(map(sum, layer)) != total:
                raise ValueError(
                    f"engram_num_embeddings: the primes sum to {sum(map(sum, layer))}, "
                    f"the config says {total}. Correct engram_vocab_size or the count"
                )

    def rows(self, token_ids: list[int], ordinal: int) -> torch.Tensor:
        """Table rows [T, orders * heads] of the n-grams that end at each token; int64."""
        c = self.c
        layer = c.engram_layer_ids[ordinal]
        m = multipliers(layer, c.engram_max_ngram_size, c.engram_compressed_vocab_size)
        pad = self.class_of[c.engram_pad_token_id]
        u = [self.class_of[t] for t in token_ids]
        table = []
        for pos in range(len(u)):
            x, offset, row = u[pos] * m[0], 0, []
            for back in range(1, c.engram_max_ngram_size):
                x ^= (u[pos - back] if pos >= back else pad) * m[back]
                for p in self.primes[ordinal][back - 1]:
                    row.append(x % p + offset)
                    offset += p
            table.append(row)
        return torch.tensor(table, dtype=torch.int64)

    def inject(self, X: torch.Tensor, rows: torch.Tensor, layer: int, linear, rms) -> torch.Tensor:
        """``X`` [T, hc, D] plus the gated value of each copy; ``linear`` quantises its input."""
        p = f"layers.{layer}.engram"
        T, hc, D = X.shape
        gathered = self.weights.table_rows(f"{p}.embed", rows.flatten()).view(T, -1)
        out = linear(f"{p}.wkv", gathered)
        key, value = out[:, : hc * D].view(T, hc, D), out[:, hc * D :]
        qw, kw = self.weights.plain(f"{p}.q_weight"), self.weights.plain(f"{p}.k_weight")
        d = (X * qw * kw * key).sum(-1) * rms(X)[..., 0] * rms(key)[..., 0] * D**-0.5
        gate = torch.sigmoid(d.sign() * d.abs().clamp_min(1e-6).sqrt())
        return X + gate[..., None] * value[:, None]
