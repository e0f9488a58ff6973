# SPDX-License-Identifier: Apache-2.0
"""`reference.select` in a few launches: queries, scores, top-k.  Importing this module imports Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ..formats.records import Fp8IndexRecord, IndexRecord, Record
from ..paging import Paged
from . import reference
from .triton_query import _query
from .triton_scores import _scores
from .triton_topk import _first_level, _second_level


@dataclass(frozen=True)
class Config:
    """Shapes of the launches; none of them changes a bit of the result.

    rows: of a tile of queries; keys: of a tile of keys; programs: how many the score kernel should have; chunk: scores
    that one program of the top-k holds; workspace: bytes of scores at a time.
    """

    rows: int = 4
    keys: int = 64
    warps: int = 4
    programs: int = 132 * 4
    chunk: int = 16384
    workspace: int = 256 << 20


def config_of(record: Record, rows: int, gather: bool) -> Config:
    """By the rows of the longest request."""
    if gather:
        return Config(rows=1)
    return Config(rows=min(triton.next_power_of_2(max(rows, 1)), 4))


def select(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, freq: torch.Tensor, req: torch.Tensor, first: torch.Tensor,
    keys: Paged, record: Record, ratio: int, topk: int, bound: int,
    candidates: tuple[int, int] | None = None, allowed: torch.Tensor | None = None, most_rows: int = 0,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`reference.select`, which also runs for float64 and for shapes that are not powers of two.

    Rows are invariant: a row's scores, and so its choice, have the same bits whatever is computed beside it.
    """
    if not _fits(q, keys, record, topk, candidates):
        return reference.select(q, weights, positions, freq, req, first, keys, record, ratio, topk, bound, candidates, allowed, most_rows)
    reference.check_candidates(topk, candidates, allowed)
    rows, device = q.shape[0], q.device
    chosen = torch.empty(rows, topk, dtype=torch.int32, device=device)
    source = candidates is not None and allowed is None
    kept = torch.empty(rows, candidates[0], dtype=torch.int32, device=device) if source else None
    if not rows:
        return chosen, kept
    if allowed is not None and bound <= candidates[0] * candidates[1]:
        allowed = None  # every block of every row is a candidate: the keys can be shared
    c = config or config_of(record, most_rows or rows, allowed is not None)
    if allowed is not None:
        c = replace(c, rows=1)
    size = candidates[1] if candidates is not None else 0
    everything = min(topk, candidates[0] * size) if source else topk
    width = allowed.shape[1] * size if allowed is not None else bound
    step = max(1, c.workspace // (4 * width))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        score = best = torch.empty(1, 16, dtype=torch.float32, device=device)  # not read where every row chooses all it sees
        if bound > everything:
            score, best = _scored(
                q, weights, positions, freq, first, keys, record, ratio, everything, width, candidates, allowed, source, begin, end, most_rows or rows, c
            )
        shared = positions, req, keys.block_table.shape[0], ratio, begin, end - begin, c.chunk
        _best(score, topk, chosen, width, *shared, 1, size if allowed is not None else 0, allowed)
        if source:
            _best(best, candidates[0], kept, -(-bound // size), *shared, size, 0, None)
    return chosen, kept


def _fits(q: torch.Tensor, keys: Paged, record: Record, topk: int, candidates: tuple[int, int] | None) -> bool:
    def power(n: int) -> bool:
        return n > 0 and n & (n - 1) == 0

    known = isinstance(record, IndexRecord | Fp8IndexRecord) and record.width * keys.states * keys.cache.shape[0] > 0
    shape = power(q.shape[1]) and power(record.dim) and record.dim >= 32
    chosen = topk <= 2048 and (candidates is None or (candidates[0] <= 2048 and power(candidates[1]) and candidates[1] <= 64))
    paged = keys.cache.stride(1) == record.width and (record.width % 4 or (keys.cache.stride(0) | keys.cache.storage_offset()) % 4 == 0)
    return q.dtype != torch.float64 and known and shape and chosen and paged


def _scored(q, weights, positions, freq, first, keys, record, ratio, everything, width, candidates, allowed, source, begin, end, most_rows, c):
    """Scores float32 [rows, width] of rows begin .. end - 1 where `_best` reads them, and the best of each block (or None).

    everything: rows that see as many keys or fewer have none.
    """
    rows, heads, dim = end - begin, q.shape[1], record.dim
    fp4 = isinstance(record, IndexRecord)
    requests = keys.block_table.shape[0]
    score = torch.empty(rows, _padded(width), dtype=torch.float32, device=q.device)
    size = candidates[1] if candidates is not None else 0
    best = torch.empty(rows, _padded(-(-width // size)), dtype=torch.float32, device=q.device) if source else None
    tile_rows = c.rows
    per = -(-min(most_rows, rows) // tile_rows)
    count = rows // tile_rows + requests
    if requests * per <= count:
        count = requests * per
    else:
        per = 0
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16 if fp4 else torch.float8_e4m3fn, device=q.device)
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    out_weights = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    tiles = torch.empty(count, 4, dtype=torch.int32, device=q.device)
    q = q if q.stride(2) == 1 and q.stride(1) == dim else q.contiguous()
    _query[(count, tile_rows)](
        q, q.stride(0), weights, weights.stride(0), positions, freq, first, out, out_weights, tiles,
        requests, begin, end, per, ratio, everything,
        HEADS=heads, DIM=dim, ROPE=2 * freq.shape[0], ROWS=tile_rows, FP4=fp4, num_warps=4,
    )
    parts = max(1, min(-(-width // c.keys), -(-c.programs // count)))
    cache, words = keys.cache, keys.cache if record.width % 4 else keys.cache.view(torch.int32)
    _scores[(count, parts)](
        out, out_weights, tiles, positions, score, score.stride(0), best, best.stride(0) if source else 0,
        cache, words, words.stride(0), keys.block_table, keys.block_table.stride(0),
        allowed, allowed.stride(0) if allowed is not None else 0, allowed.shape[1] if allowed is not None else 0, begin, parts, ratio,
        HEADS=heads, DIM=dim, ROWS=max(tile_rows, 16 // heads), FEWEST=max(1, 16 // heads), KEYS=c.keys, FP4=fp4, WIDTH=record.width, STATES=keys.states,
        UNIT=min(c.keys, keys.states & -keys.states, size if allowed is not None else c.keys),
        SOURCE=size if source else 0, GATHER=size if allowed is not None else 0, num_warps=c.warps, num_stages=1,
    )
    return score, best


def _best(values, k, out, bound, positions, req, requests, ratio, begin, rows, most, unit, gather, allowed):
    """The k best of each row of `values`, whose rows have up to `bound` places, into rows begin .. of `out`."""
    chunk = min(4096 if bound <= 4096 else 16384, most)  # few: each is compiled
    chunks = -(-bound // chunk)
    fill = triton.next_power_of_2(k)
    listed = chunks * k if chunks > 1 else 0
    list_bits = list_ids = out  # not written where there is one chunk
    if listed:
        list_bits, list_ids = (torch.empty(rows, listed, dtype=torch.int32, device=values.device) for _ in range(2))
    blocks = allowed.shape[1] if gather else 0
    shape = dict(K=k, FILL=fill, CHUNK=chunk, UNIT=unit, GATHER=gather)
    _first_level[(rows, chunks)](
        values, values.stride(0), positions, req, allowed, allowed.stride(0) if gather else 0, out, out.stride(0),
        list_bits, list_ids, listed, begin, requests, blocks, ratio, **shape, num_warps=_warps(chunk),
    )
    if listed:
        size = 4096 if listed <= 4096 else triton.next_power_of_2(max(listed, 32768))
        _second_level[(rows,)](
            positions, req, out, out.stride(0), list_bits, list_ids, listed, begin, requests, blocks, ratio,
            **shape, LIST=size, num_warps=min(2 * _warps(size), 32),
        )


def _padded(places: int) -> int:
    """Rows start at multiples of 64 bytes."""
    return -(-places // 16) * 16


def _warps(places: int) -> int:
    """32 values a thread."""
    return max(1, min(32, places // 1024))
