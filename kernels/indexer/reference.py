# SPDX-License-Identifier: Apache-2.0
"""The plain form of the indexer.  (v41-facts 4.5)"""

from __future__ import annotations

import torch

_CHUNK_VALUES = 1 << 26


def scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """score[t, j] = sum_h w[t, h] relu(q[t, h] . k_j); -inf for j >= visible[t].

    q [T, H, d], weights [T, H], keys [n, d] of one request, visible int64 [T] -> [T, n] in q's dtype.
    """
    out = torch.empty(q.shape[0], keys.shape[0], dtype=q.dtype, device=q.device)
    step = max(1, _CHUNK_VALUES // (q.shape[1] * max(keys.shape[0], 1)))
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        dots = torch.einsum("thd,nd->thn", q[rows], keys).relu_()
        out[rows] = (dots * weights[rows, :, None]).sum(1)
    hidden = torch.arange(keys.shape[0], device=q.device)[None] >= visible[:, None]
    return out.masked_fill_(hidden, float("-inf"))


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
