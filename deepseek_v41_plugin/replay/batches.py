# SPDX-License-Identifier: Apache-2.0
"""Steps of a host in numbers, and random ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .plan import Policy


@dataclass(frozen=True)
class Batch:
    """The requests of a step: the arguments of `plan` [R], and blocks int64 [R, n] of block_size tokens.

    The blocks reach to the prefill's end.  Window and prefix-cacheable caches have pools of their own;
    one block table stands for both.
    """

    first_position: np.ndarray
    rows: np.ndarray
    prefill: np.ndarray
    replay_start: np.ndarray
    whole: np.ndarray
    blocks: np.ndarray
    block_size: int

    def requests(self) -> np.ndarray:
        """int64 [T]: the request of each row; a request's rows are adjacent."""
        return np.repeat(np.arange(len(self.rows)), self.rows)

    def positions(self) -> np.ndarray:
        """int64 [T], absolute."""
        before = np.cumsum(self.rows) - self.rows
        return np.arange(self.rows.sum()) + np.repeat(self.first_position - before, self.rows)

    def slots(self) -> np.ndarray:
        """Token slots int64 [T]: block * block_size + position % block_size."""
        positions = self.positions()
        block = self.blocks[self.requests(), positions // self.block_size]
        return block * self.block_size + positions % self.block_size


def random_batches(rng: np.random.Generator, policy: Policy, count: int) -> Iterator[Batch]:
    """`count` batches of decodes (some with drafts) and prefill chunks, fresh and after hits.

    Prompts are shorter and longer than the window and keep_tokens, hits end at any even position,
    chunks start and end anywhere, and often where something starts or ends.
    """
    for _ in range(count):
        yield _draw(rng, policy, int(rng.integers(1, 17)))


def _draw(rng: np.random.Generator, policy: Policy, n: int) -> Batch:
    window, keep = policy.window, max(policy.keep_tokens, policy.window)
    longest = rng.choice([window, window + 4, keep + 4, 2 * keep, 4 * keep], n)
    prefill = rng.integers(1, longest + 1)
    # A hit is even, longer than the window, and leaves a token to compute.
    hits = np.maximum((prefill - 1) // 2 - window // 2, 0)
    hit = 2 * (window // 2 + rng.integers(1, np.maximum(hits, 1) + 1))
    start = np.where((hits > 0) & (rng.random(n) < 0.6), hit - window, 0)

    edges = np.stack((start, start + window, prefill - keep, prefill - window, prefill, rng.integers(start, prefill)))

    def edge() -> np.ndarray:
        return edges[rng.integers(0, len(edges), n), np.arange(n)] + rng.integers(-1, 2, n)

    first = np.clip(np.where(rng.random(n) < 0.3, start, edge()), start, prefill - 1)
    last = np.clip(np.where(rng.random(n) < 0.3, prefill - 1, edge()), first, prefill - 1)
    decode = rng.random(n) < 0.4
    first = np.where(decode, prefill + rng.integers(0, 2 * window, n), first)
    rows = np.where(decode, 1 + rng.integers(0, policy.drafts + 1, n), last - first + 1)

    block_size = int(rng.choice([2, 16, 32]))
    width = -(-int(np.maximum(first + rows, prefill).max()) // block_size)
    blocks = rng.permutation(n * width).reshape(n, width)
    return Batch(first, rows, prefill, start, rng.random(n) < 0.1, blocks, block_size)
