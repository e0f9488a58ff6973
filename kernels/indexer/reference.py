# SPDX-License-Identifier: Apache-2.0
"""The plain form of the indexer.  (v41-facts 4.5)"""

from __future__ import annotations

import torch

from ..rope import rope
from ..formats.records import Record
from ..formats.scalar import widened
from ..invariant import enabled, over_rows
from ..paging import Paged, read_rows, slots_of

_CHUNK_VALUES = 1 << 26
# Keys of a tile in the batch-invariant mode: a key's place in its tile does not depend on how many there are.
_TILE_KEYS = 128


def scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """score[t, j] = sum_h w[t, h] relu(q[t, h] . k_j); -inf for j >= visible[t].

    q [T, H, d], weights [T, H], keys [n, d] of one request or [T, n, d] of each row, visible int64
    [T] -> [T, n] in q's dtype.
    """
    n = keys.shape[-2]
    hidden = torch.arange(n, device=q.device)[None] >= visible[:, None]
    if enabled():
        return _tiled_scores(q, weights, keys)[:, :n].masked_fill(hidden, float("-inf"))
    out = torch.empty(q.shape[0], n, dtype=q.dtype, device=q.device)
    step = max(1, _CHUNK_VALUES // (q.shape[1] * max(n, 1)))
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        dots = torch.einsum("thd,nd->thn", q[rows], keys) if keys.dim() == 2 else q[rows] @ keys[rows].mT
        out[rows] = (dots.relu_() * weights[rows, :, None]).sum(1)
    return out.masked_fill_(hidden, float("-inf"))


def _tiled_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[T, n or more]; the same for keys of one request and the same keys repeated for each row."""
    n = max(keys.shape[-2], 1)
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -(-n // _TILE_KEYS) * _TILE_KEYS - keys.shape[-2]))
    tiles = keys.expand(q.shape[0], -1, -1).split(_TILE_KEYS, 1)
    return torch.cat([over_rows(lambda q, w, k: ((q @ k.mT).relu_() * w[:, :, None]).sum(1), q, weights, k) for k in tiles], 1)


def best_rows(score: torch.Tensor, k: int) -> torch.Tensor:
    """The k best rows, ascending, -1 at the end: score [T, n] -> int64 [T, k].

    -inf is never chosen; ties go to the lower row.
    """
    order = score.sort(dim=-1, descending=True, stable=True)
    rows = order.indices[:, :k].masked_fill(order.values[:, :k] == float("-inf"), score.shape[1])
    rows = rows.sort(-1).values
    rows = rows.masked_fill(rows == score.shape[1], -1)
    return torch.nn.functional.pad(rows, (0, k - rows.shape[1]), value=-1)


def best_blocks(score: torch.Tensor, visible: torch.Tensor, k: int, size: int) -> torch.Tensor:
    """Which rows lie in the k best blocks of `size` rows: score [T, n], visible [T] -> bool [T, n].

    A block's score is its best row's; the block of the last visible row is always kept; a block
    without a visible row never is; ties go to the lower block.
    """
    rows, n = score.shape
    blocks = -(-n // size)
    padded = torch.nn.functional.pad(score, (0, blocks * size - n), value=float("-inf"))
    best = padded.view(rows, blocks, size).amax(-1)
    last = (visible - 1).clamp(min=0) // size
    forced = (torch.arange(blocks, device=score.device)[None] == last[:, None]) & (visible > 0)[:, None]
    best = best.masked_fill(forced, float("inf"))
    order = best.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros(rows, blocks, dtype=torch.bool, device=score.device)
    kept.scatter_(1, order.indices[:, :k], order.values[:, :k] > float("-inf"))
    return kept.repeat_interleave(size, 1)[:, :n]


def select(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, freq: torch.Tensor, req: torch.Tensor, first: torch.Tensor,
    keys: Paged, record: Record, ratio: int, topk: int, bound: int,
    candidates: tuple[int, int] | None = None, allowed: torch.Tensor | None = None, most_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The compressed rows that each row attends to.  (v41-facts 4.5)

    q [T, H, d] before RoPE; weights [T, H], scaled already; positions, req int64 [T]; freq float64 [rope/2] radians a
    position; first int64 [R + 1] row offsets of the requests; keys: the index keys' pages; bound: an upper bound of
    visible = (positions + 1) // ratio; most_rows: one of the rows of a request.  Padding (req = R or a position below
    0) chooses nothing.

    candidates (blocks kept, block size), kept * size >= topk, makes the layer a candidate source, or with `allowed` one
    that reads only the blocks a source returned for the same rows: int32 [T, kept], ascending, -1 at the end.
    -> (chosen int32 [T, topk], the source's blocks int32 [T, kept] or None), ascending, -1 at the end.
    """
    check_candidates(topk, candidates, allowed)
    chosen = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    source = candidates is not None and allowed is None
    kept = torch.full((q.shape[0], candidates[0]), -1, dtype=torch.int32, device=q.device) if source else None
    visible = ((positions + 1) // ratio).clamp(min=0)
    offsets = first.tolist()
    for r, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        n = int(visible[begin:end].max()) if begin < end else 0
        if not n:
            continue
        mine, seen = slice(begin, end), visible[begin:end]
        logical = torch.arange(n, device=q.device)
        slots = slots_of(keys.block_table[r : r + 1], torch.zeros_like(logical[:1]), logical[None], keys.states)[0]
        turned = record.round(widened(rope(q[mine], positions[mine], freq)))
        score = scores(turned, weights[mine].to(turned.dtype), read_rows(keys.cache, slots, record, turned.dtype), seen)
        if source:
            inside = best_blocks(score, seen, *candidates)[:, :: candidates[1]]
            kept[mine] = _ids(inside, candidates[0])
        elif allowed is not None:
            inside = torch.zeros(end - begin, -(-n // candidates[1]) + 1, dtype=torch.bool, device=q.device)
            inside.scatter_(1, allowed[mine].long() % inside.shape[1], True)  # -1 is the column behind the blocks
            inside = inside[:, :-1].repeat_interleave(candidates[1], 1)[:, :n]
            score = score.masked_fill(~inside & (seen > topk)[:, None], float("-inf"))
        chosen[mine] = best_rows(score, topk).int()
    return chosen, kept


def check_candidates(topk: int, candidates: tuple[int, int] | None, allowed: torch.Tensor | None) -> None:
    """Raises ValueError where `select` has no meaning."""
    if candidates is None and allowed is not None:
        raise ValueError("allowed: candidate blocks need candidates; give (blocks kept, block size)")
    if candidates is not None and candidates[0] * candidates[1] < topk:
        raise ValueError(f"candidates: {candidates[0]} blocks of {candidates[1]} rows are below topk; give at least {topk} rows")


def _ids(mask: torch.Tensor, k: int) -> torch.Tensor:
    """bool [T, n], at most k set in a row -> their columns int32 [T, k], ascending, -1 at the end."""
    n = mask.shape[1]
    column = torch.arange(n, device=mask.device, dtype=torch.int32).masked_fill(~mask, n).sort(-1).values[:, :k]
    return torch.nn.functional.pad(column.masked_fill(column == n, -1), (0, k - column.shape[1]), value=-1)
