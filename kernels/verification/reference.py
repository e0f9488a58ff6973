# SPDX-License-Identifier: Apache-2.0
"""The plain form of trimming a batch to a budget of verified drafts.  (v41-facts 8.5)

No value is read back to the host: every shape follows from arguments the host knows.  Twins must
equal it bit for bit, since ranks that disagree on a length hang.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Trim(NamedTuple):
    """A batch after trimming.  R requests, `rows` and `logits` the host's capacities (padded sizes).

    lengths     int32 [R]      verified drafts of each request
    start       int32 [R+1]    first row of each request in the trimmed batch (query_start_loc)
    source      int64 [rows]   row of the full batch that lands in this row; -1 beyond the end
    request     int64 [rows]   request of this row; R beyond the end
    logit_start int32 [R+1]    first logit of each request
    logit_rows  int64 [logits] trimmed row that each logit is taken from; -1 beyond the end
    """

    lengths: torch.Tensor
    start: torch.Tensor
    source: torch.Tensor
    request: torch.Tensor
    logit_start: torch.Tensor
    logit_rows: torch.Tensor


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """S_i = c_1 ... c_i of confidences [R, k], clamped to 0..1 (NaN: 0), in their dtype.

    Multiplied from the left, column by column: a scan that associates otherwise may round S_i above
    S_{i-1}, and devices would differ.
    """
    columns = list(confidence.nan_to_num(nan=0.0).clamp(0, 1).unbind(1))
    for i in range(1, len(columns)):
        columns[i] = columns[i - 1] * columns[i]
    return torch.stack(columns, 1)


def lengths(confidence: torch.Tensor, drafts: torch.Tensor, budget: torch.Tensor | int) -> torch.Tensor:
    """How many drafts of each request to verify, int32 [R]: a prefix each, at most `budget` in total.

    confidence [R, k]; drafts int [R] in 0..k; budget an int or an integer tensor of one element on the
    same device.  The drafts with the highest survival win; among equals the earlier position, then the
    lower request.  As survival never rises along a request, winners are prefixes.
    """
    requests, k = confidence.shape
    chance = survival(confidence)
    position = torch.arange(k, device=confidence.device)
    chance = chance.masked_fill(position >= drafts[:, None], -1.0)
    # [k, R] flattened: the stable sort then keeps position before request among equals.
    order = chance.t().reshape(-1).sort(descending=True, stable=True)
    ranks = torch.arange(requests * k, device=confidence.device)
    won = (ranks < budget) & (order.values >= 0)
    kept = torch.zeros_like(won).scatter_(0, order.indices, won)
    return kept.view(k, requests).sum(0, dtype=torch.int32)


def remap(lengths: torch.Tensor, drafts: torch.Tensor, base: torch.Tensor, rows: int, logits: int) -> Trim:
    """The trimmed batch of given lengths; arguments as in `trim`."""
    full = _starts(base + drafts)
    start = _starts(base + lengths)
    request, offset = _locate(start, rows)
    source = torch.where(offset >= 0, full[request] + offset, -1)
    # The last 1 + length rows of a request give logits; a padding request (no rows) gives none.
    logit_start = _starts(torch.where(base > 0, lengths + 1, 0))
    owner, at = _locate(logit_start, logits)
    count = logit_start.diff(append=logit_start[-1:])
    end = torch.cat((start[1:], start[-1:]))
    logit_rows = torch.where(at >= 0, end[owner] - count[owner] + at, -1)
    return Trim(lengths.int(), start.int(), source, request, logit_start.int(), logit_rows)


def trim(
    confidence: torch.Tensor,
    drafts: torch.Tensor,
    base: torch.Tensor,
    budget: torch.Tensor | int,
    rows: int,
    logits: int,
) -> Trim:
    """Chooses lengths and remaps the batch, without a host sync.

    confidence [R, k] fresh and calibrated; drafts int [R] drafts at the end of each request's rows;
    base int [R] its other rows (0 only for a padding request, which has no drafts); budget as in
    `lengths`; rows >= sum(base) + min(budget, sum(drafts)); logits >= R + min(budget, sum(drafts)).
    """
    return remap(lengths(confidence, drafts, budget), drafts, base, rows, logits)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """int64 [R + 1]: exclusive sums of int [R] and the total."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _locate(start: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(owner, offset inside it) int64 [size] of slots 0..size-1 under starts [R + 1]; beyond: (R, -1)."""
    slot = torch.arange(size, device=start.device)
    owner = torch.searchsorted(start[1:].contiguous(), slot, right=True)
    return owner, torch.where(slot < start[-1], slot - start[owner], -1)
