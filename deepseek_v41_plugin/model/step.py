# SPDX-License-Identifier: Apache-2.0
"""One forward step as the layers see it: rows of many requests, and the host's pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


def requests_of(first: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [count]: the request of each row, from row offsets int [R+1] on the device; R for rows past the last."""
    row = torch.arange(count, device=first.device, dtype=first.dtype)
    return torch.searchsorted(first[1:].contiguous(), row, right=True)


class Window(NamedTuple):
    """The positions each row's window may read: lowest and highest int64 [T] (none where lowest > highest), at most `count`."""

    low: torch.Tensor
    high: torch.Tensor
    count: int


@dataclass
class Rows:
    """T rows of R requests, each request's rows adjacent.

    positions int64 [T] absolute; req int64 [T]; first int64 [R+1] row offsets on the device; start:
    the same on the host, where those of the leading `ragged` requests are only bounds (the device
    trimmed their drafts; the sum over them is exact); context: R sequence lengths including this
    step's rows, on the host (upper bounds are allowed); most: an upper bound of a request's rows (0: T).

    A padding row, as CUDA graphs have them, has position -1: it sees nothing, and what it computes is
    finite and left unread.
    """

    positions: torch.Tensor
    req: torch.Tensor
    first: torch.Tensor
    start: list[int]
    context: list[int]
    ragged: int = 0
    most: int = 0

    @classmethod
    def padded(cls, positions: torch.Tensor, first: torch.Tensor, longest: int, most: int = 0) -> Rows:
        """Rows of which the host knows no more than that no sequence is longer than `longest`: for a CUDA graph.

        positions int64 [T]; first int64 [R+1]: rows from first[R] on are padding.
        """
        count, requests = positions.shape[0], first.shape[0] - 1
        req = requests_of(first, count)
        positions = torch.where(req < requests, positions, -1)
        start = [count * r // requests for r in range(requests + 1)]
        return cls(positions, req.clamp(max=requests - 1), first, start, [longest] * requests, requests, most)

    @property
    def count(self) -> int:
        return self.start[-1]

    @property
    def longest(self) -> int:
        """An upper bound of the sequence lengths."""
        return max(self.context, default=0)

    def first_of_request(self) -> torch.Tensor:
        """int64 [T]: the row at which the row's request starts."""
        return self.first[self.req]

    def end_of_request(self) -> torch.Tensor:
        """int64 [T]: one past the last row of the row's request."""
        return self.first[self.req + 1]

    def window(self, size: int) -> Window:
        """The last `size` positions, the row's own included."""
        return Window(self.positions - size + 1, self.positions, size)

    def tail(self, dropped: list[int]) -> tuple[torch.Tensor, Rows]:
        """Without the first `dropped[r]` rows of each request: (rows kept int64 [K], Rows)."""
        lost = [0]
        for count in dropped:
            lost.append(lost[-1] + count)
        gone = torch.tensor(lost, device=self.first.device)
        first = self.first - gone
        start = [a - b for a, b in zip(self.start, lost, strict=True)]
        req = requests_of(first, start[-1])
        kept = torch.arange(start[-1], device=first.device) + gone[req + 1]
        return kept, Rows(self.positions[kept], req, first, start, self.context, self.ragged, self.most)


@dataclass
class BlockRows(Rows):
    """The draft's rows: a block a request, all of which see the whole block and the window before it."""

    block: int = 1

    def window(self, size: int) -> Window:
        high = torch.where(self.positions < 0, -1, self.positions[self.end_of_request() - 1])
        return Window(self.positions[self.first_of_request()] - size, high, size + self.block)


@dataclass
class Pages:
    """A paged cache and where this step's rows lie in it.

    cache [blocks, states, width]; block_table int32 [R, n]; slots int64 [T], token slots
    (block * block_size + position % block_size), -1 where nothing is to be written; block_size in
    tokens.  For rings (one block a request) slots is None.  held_from int64 [R]: the first position
    of each request that the cache holds (bounded replay; None: all from 0).
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor | None
    block_size: int
    held_from: torch.Tensor | None = None

    @property
    def states(self) -> int:
        return self.cache.shape[1]


@dataclass
class LayerPages:
    """The caches of one layer; None where the layer has none of that kind."""

    window: Pages
    compressed: Pages | None = None
    index: Pages | None = None
    ring: Pages | None = None


@dataclass
class Step:
    """Everything a forward needs beside token ids: rows, pages by layer, and what layers share.

    `selected[L]` int32 [T, k] are index source L's chosen rows, `candidates[L]` int32 [T, n] candidate
    source L's blocks; both ascending, -1 at the end.
    """

    rows: Rows
    pages: dict[int, LayerPages]
    selected: dict[int, torch.Tensor] = field(default_factory=dict)
    candidates: dict[int, torch.Tensor] = field(default_factory=dict)
    decoder: Decoder | None = None
    _windows: dict[int | None, tuple[torch.Tensor | None, Window]] = field(default_factory=dict, repr=False)

    def window(self, pages: Pages, size: int) -> Window:
        """What the rows see of a window cache: worked out once for all layers whose caches begin alike."""
        held_from = pages.held_from
        key = None if held_from is None else id(held_from)
        if key not in self._windows:
            low, high, count = self.rows.window(size)
            low = low.clamp(min=0) if held_from is None else low.maximum(held_from[self.rows.req])
            self._windows[key] = held_from, Window(low, high, count)
        return self._windows[key][1]


@dataclass
class Decoder:
    """What runs behind the last KV source's caches, where that differs from the step itself.

    kept int64 [K]: the step's rows that go on, ascending (None: all do); step: their rows, and pages
    from the last KV source's layer on.  (v41-facts 10)
    """

    kept: torch.Tensor | None
    step: Step
