# SPDX-License-Identifier: Apache-2.0
"""One forward step as the layers see it: rows of many requests, and the host's pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def requests_of(start: list[int], device: torch.device) -> torch.Tensor:
    """int64 [T]: the request of each row, from R+1 row offsets."""
    lengths = torch.tensor(start, device=device).diff()
    return torch.arange(len(start) - 1, device=device).repeat_interleave(lengths, output_size=start[-1])


@dataclass
class Rows:
    """T rows of R requests, each request's rows adjacent.

    positions int64 [T] absolute; req int64 [T]; start: R+1 row offsets on the host; context: R
    sequence lengths including this step's rows, on the host (upper bounds are allowed).
    """

    positions: torch.Tensor
    req: torch.Tensor
    start: list[int]
    context: list[int]

    @property
    def count(self) -> int:
        return self.start[-1]

    def first_of_request(self) -> torch.Tensor:
        """int64 [T]: the row at which the row's request starts."""
        return torch.tensor(self.start[:-1], device=self.req.device)[self.req]

    def end_of_request(self) -> torch.Tensor:
        """int64 [T]: one past the last row of the row's request."""
        return torch.tensor(self.start[1:], device=self.req.device)[self.req]


@dataclass
class Pages:
    """A paged cache and where this step's rows lie in it.

    cache [blocks, states, width]; block_table int32 [R, n]; slots int64 [T], token slots
    (block * block_size + position % block_size), -1 where nothing is to be written; block_size in
    tokens.  For rings (one block a request) slots is None.
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor | None
    block_size: int

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

    `selected[L]` int64 [T, k] are index source L's chosen rows; `candidates[L]` is, per request, a
    bool [rows, n] mask of the rows inside the candidate blocks (None: all are).
    """

    rows: Rows
    pages: dict[int, LayerPages]
    selected: dict[int, torch.Tensor] = field(default_factory=dict)
    candidates: dict[int, list[torch.Tensor] | None] = field(default_factory=dict)
