# SPDX-License-Identifier: Apache-2.0
"""Who sends what when one layer's map changes: a pure function of the old and the new map."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RankMoves:
    """What one rank does.  Slots and rows count from 0 on their rank; a buffer has a row for each slot.

    pushes: (slot, peer, row): its slot `slot` goes into row `row` of `peer`'s buffer, in this order; `peer` may be
    the rank itself.  fills: (slot, row, n): slots slot .. slot + n - 1 take buffer rows row .. row + n - 1.
    """

    pushes: tuple[tuple[int, int, int], ...]
    fills: tuple[tuple[int, int, int], ...]


def moves(old: np.ndarray, new: np.ndarray, ranks: int) -> list[RankMoves]:
    """The moves of every rank that turn int64 [P] `old` into `new`.

    Everything goes through the buffers, so all of a layer's slots change as if at once.  An expert that a rank
    gains crosses to it once, from the old holder that has the least to send; one that it had is copied there.
    A rank sends in turn to rank + 1, rank + 2, ..., so that no receiver has all senders at once.
    """
    local = len(old) // ranks
    held: list[dict[int, int]] = []  # of each rank: expert -> its first slot
    for rank in range(ranks):
        experts = old[rank * local : (rank + 1) * local].tolist()
        held.append({expert: slot for slot, expert in reversed(list(enumerate(experts)))})
    holders = defaultdict(list)
    for rank, slots in enumerate(held):
        for expert in slots:
            holders[expert].append(rank)

    fills: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    pushes: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    remote = []
    for rank in range(ranks):
        rows: dict[int, int] = {}  # expert -> the buffer row it comes in
        for slot in range(local):
            p = rank * local + slot
            if old[p] == new[p]:
                continue
            expert = int(new[p])
            if expert not in rows:
                rows[expert] = slot
                if expert in held[rank]:
                    pushes[rank].append((held[rank][expert], rank, slot))
                else:
                    remote.append((expert, rank, slot))
            fills[rank].append((slot, rows[expert]))

    sent = [0] * ranks
    for expert, peer, row in sorted(remote, key=lambda need: (len(holders[need[0]]), need)):  # the least choice first
        sender = min(holders[expert], key=lambda rank: (sent[rank], (peer - rank) % ranks))
        sent[sender] += 1
        pushes[sender].append((held[sender][expert], peer, row))
    return [RankMoves(_in_turn(pushes[rank], rank, ranks), _runs(fills[rank])) for rank in range(ranks)]


def _in_turn(pushes: list[tuple[int, int, int]], rank: int, ranks: int) -> tuple[tuple[int, int, int], ...]:
    """One push to each peer, starting behind `rank` and ending with itself; then the second to each; and so on."""
    seen = [0] * ranks
    keyed = []
    for push in sorted(pushes):
        keyed.append((seen[push[1]], (push[1] - rank - 1) % ranks, push))
        seen[push[1]] += 1
    return tuple(push for *_, push in sorted(keyed))


def _runs(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """(slot, row) pairs, slots ascending, joined where both go up by one."""
    runs: list[tuple[int, int, int]] = []
    for slot, row in pairs:
        if runs and (slot, row) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((slot, row, 1))
    return tuple(runs)


def digest(*maps: np.ndarray) -> bytes:
    """16 bytes that differ when int64 maps do, in any number or shape."""
    state = hashlib.blake2b(digest_size=16)
    for given in maps:
        state.update(repr(given.shape).encode())
        state.update(np.ascontiguousarray(given, dtype=np.int64).tobytes())
    return state.digest()
