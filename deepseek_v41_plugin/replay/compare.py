# SPDX-License-Identifier: Apache-2.0
"""The modes' metadata against each other and against the rules."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from .batches import Batch
from .metadata import KINDS, LayerRows, describe
from .plan import Policy


def first_difference(policy: Policy, batch: Batch) -> str | None:
    """What is wrong with the metadata of mask or compact for `batch`, or None.

    policy.decoder is not read.  Rows that compact runs have the same keys and slots in mask; those that
    it drops are its request's first ones and see nothing after the cut in mask.  No slot is written
    twice, none of a shared block for a replayed position.  All keys of a row were written since the
    request started or resumed, wherever its chunks ended.  Before the cut, at the last rows of a prefill
    and at decodes no window is narrower than the replay demands.
    """
    # All rows from where the requests started, those of the prefill after this step too, as one chunk.
    end = np.maximum(batch.first_position + batch.rows, batch.prefill)
    history = replace(batch, first_position=batch.replay_start, rows=end - batch.replay_start)
    modes = {}
    for mode in ("mask", "compact"):
        asked = replace(policy, decoder=mode)
        modes[mode] = describe(asked, batch)
        past = describe(asked, history)
        for kind, layer in modes[mode].items():
            if problem := _rules(policy, kind, layer, batch) or _written(layer, batch, past[kind], history):
                return f"{mode}, {kind} layers: {problem}"
    for kind in KINDS:
        if problem := _compare(modes["mask"][kind], modes["compact"][kind], batch):
            return f"{kind} layers: {problem}"
    blind, kept = modes["mask"]["later"], modes["compact"]["later"].rows
    wrong = np.isin(blind.rows, kept) != (blind.key_low <= blind.key_high)
    if wrong.any():
        return f"{_row(wrong, blind.rows, batch)}: compact drops what sees keys in mask, or runs what sees none"
    return None


def _row(wrong: np.ndarray, rows: np.ndarray, batch: Batch) -> str:
    """The first of `rows` that `wrong` marks."""
    row = rows[np.argmax(wrong)]
    return f"row {row} (request {batch.requests()[row]}, position {batch.positions()[row]})"


def _rules(policy: Policy, kind: str, layer: LayerRows, batch: Batch) -> str | None:
    """What holds of one layer in one step by itself."""
    req, positions, every = batch.requests(), batch.positions(), np.arange(batch.rows.sum())
    if not np.isin(layer.rows, every).all() or (np.diff(layer.rows) <= 0).any():
        return "rows are not ascending rows of the batch"
    for name in ("window_slots", "compressed_slots"):
        written, counts = np.unique(getattr(layer, name), return_counts=True)
        twice = (counts > 1) & (written >= 0)
        if twice.any():
            return f"slot {written[np.argmax(twice)]} is twice among {name}"
    replayed = (batch.replay_start > 0)[req] & (positions < batch.replay_start[req] + policy.window)
    new = ~replayed & (kind != "later")
    wrong = (layer.compressed_slots >= 0) != new
    if wrong.any():
        return f"{_row(wrong, every, batch)} {'lacks' if new[np.argmax(wrong)] else 'writes'} a compressed row"
    wrong = layer.window_slots < 0
    if kind != "later" and wrong.any():
        return f"{_row(wrong, every, batch)} writes no window key"
    at, of = layer.positions, req[layer.rows]
    wrong = (at != positions[layer.rows]) | (layer.key_high != at)
    if wrong.any():
        return f"{_row(wrong, layer.rows, batch)} has another position or sees another newest key"
    exact = (kind != "later") | batch.whole[of] | (at >= batch.prefill[of] - policy.drafts - 1)
    wrong = exact & (layer.key_low != np.maximum(batch.replay_start[of], at - policy.window + 1))
    return f"{_row(wrong, layer.rows, batch)} has not its whole window" if wrong.any() else None


def _written(layer: LayerRows, batch: Batch, past: LayerRows, history: Batch) -> str | None:
    """Every visible key was written, and the step's writes are those of a prefill in one chunk."""
    ends = np.cumsum(history.rows)
    req = batch.requests()

    def row(request: np.ndarray, position: np.ndarray) -> np.ndarray:
        return ends[request] - history.rows[request] + position - history.first_position[request]

    here = row(req, batch.positions())
    for name in ("window_slots", "compressed_slots"):
        wrong = getattr(layer, name) != getattr(past, name)[here]
        if wrong.any():
            return f"{_row(wrong, np.arange(len(req)), batch)}: {name} depends on the chunks"
    of, seen = req[layer.rows], np.maximum(layer.key_high - layer.key_low + 1, 0)
    count = np.concatenate(([0], np.cumsum(past.window_slots >= 0)))
    low = np.minimum(layer.key_low, layer.key_high + 1)
    wrong = (low < history.first_position[of]) & (seen > 0)
    if not wrong.any():
        wrong = count[row(of, layer.key_high) + 1] - count[row(of, low)] != seen
        wrong &= seen > 0
    return f"{_row(wrong, layer.rows, batch)} sees a key that was never written" if wrong.any() else None


def _compare(mask: LayerRows, compact: LayerRows, batch: Batch) -> str | None:
    """Rows, positions, key ranges and slots of compact are mask's."""
    every, kept, req = np.arange(batch.rows.sum()), compact.rows, batch.requests()
    if not np.array_equal(mask.rows, every):
        return "mask leaves rows out"
    for field in fields(LayerRows):
        wrong = getattr(mask, field.name)[kept] != (
            getattr(compact, field.name)[kept] if field.name.endswith("slots") else getattr(compact, field.name)
        )
        if wrong.any():
            return f"{_row(wrong, kept, batch)}: mask and compact differ in {field.name}"
    dropped = ~np.isin(every, kept)
    gap = ~dropped[:-1] & dropped[1:] & (req[:-1] == req[1:])
    if gap.any():
        return f"{_row(gap, every, batch)} runs and the one after it does not"
    return None
