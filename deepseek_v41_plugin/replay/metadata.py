# SPDX-License-Identifier: Apache-2.0
"""A plan spelled out: the rows, key ranges and slots of each kind of layer, to be compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batches import Batch
from .plan import Policy, plan

KINDS = ("encoder", "cut", "later")


@dataclass(frozen=True)
class LayerRows:
    """What one layer does with the T rows of a batch, int64.

    rows [K]: those that attend; positions [K]; they see the window keys key_low .. key_high [K] (none
    where key_low is the larger).  window_slots, compressed_slots [T]: token slots that the batch's rows
    write in the window cache and in the prefix-cacheable ones (compressed rows, index keys), -1: none.
    """

    rows: np.ndarray
    positions: np.ndarray
    key_low: np.ndarray
    key_high: np.ndarray
    window_slots: np.ndarray
    compressed_slots: np.ndarray


def describe(policy: Policy, batch: Batch) -> dict[str, LayerRows]:
    """By kind: the encoder's layers (KV sources among them), the cut layer, the layers after it.

    The draft's context is that of the later layers: a draft block after row r sees what r sees there.
    """
    planned = plan(
        policy, first_position=batch.first_position, rows=batch.rows, prefill=batch.prefill,
        replay_start=batch.replay_start, whole=batch.whole,
    )
    req, positions = batch.requests(), batch.positions()
    slots = batch.slots()
    new = np.where(positions < planned.replay_end[req], -1, slots)
    nothing = np.full_like(slots, -1)
    runs = positions - batch.first_position[req] >= planned.dropped[req]

    def layer(attends, start, window_slots, compressed_slots):
        rows = np.flatnonzero(attends)
        at = positions[rows]
        low = np.maximum(start[req[rows]], at - policy.window + 1)
        return LayerRows(rows, at, low, at.copy(), window_slots, compressed_slots)

    return {
        "encoder": layer(np.ones_like(runs), planned.window_start, slots, new),
        "cut": layer(runs, planned.window_start, slots, new),
        "later": layer(runs, planned.decoder_start, np.where(runs, slots, -1), nothing),
    }
