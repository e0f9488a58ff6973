# SPDX-License-Identifier: Apache-2.0
"""The metadata that the model builds for a batch, in the terms of `replay.describe`."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from ..model.bounded import Bounds, bounded
from ..model.step import LayerPages, Pages, Rows, Step
from ..replay import KINDS, Batch, LayerRows, Policy, describe, plan

LAYERS = dict(zip(KINDS, range(3), strict=True))  # one of each kind; the encoder's is a KV source


def built(policy: Policy, batch: Batch) -> dict[str, LayerRows]:
    """As `describe`, read off the Step that the model's layers get on a CPU."""
    planned = plan(
        policy, first_position=batch.first_position, rows=batch.rows, prefill=batch.prefill,
        replay_start=batch.replay_start, whole=batch.whole,
    )
    start = np.concatenate(([0], np.cumsum(batch.rows)))
    rows = Rows(
        torch.from_numpy(batch.positions()), torch.from_numpy(batch.requests()), torch.from_numpy(start),
        start.tolist(), (batch.first_position + batch.rows).tolist(),
    )
    # Pages that stand for any: no layer runs, so the cache is empty.
    blocks, slots = torch.from_numpy(batch.blocks), torch.from_numpy(batch.slots())
    pages = Pages(torch.empty(0, batch.block_size, 0), blocks, slots, batch.block_size)
    source = LayerPages(pages, compressed=pages, index=pages)
    layers = {LAYERS["encoder"]: source, LAYERS["cut"]: source, LAYERS["later"]: LayerPages(pages)}
    step = bounded(Step(rows, layers), LAYERS["cut"], Bounds.of(planned, torch.device("cpu")))
    return {kind: _read(policy, kind, step) for kind in KINDS}


def _read(policy: Policy, kind: str, step: Step) -> LayerRows:
    layer, own, kept = LAYERS[kind], step, None
    if kind != "encoder" and step.decoder is not None:
        own, kept = step.decoder.step, step.decoder.kept
    every = torch.arange(step.rows.count)
    kept = every if kept is None else kept
    window = own.pages[layer].window
    low, high, _ = own.rows.window(policy.window)
    low = low.clamp(min=0) if window.held_from is None else torch.maximum(low, window.held_from[own.rows.req])
    if kind == "later":
        slots = torch.full_like(every, -1)
        slots[kept] = window.slots
        compressed = torch.full_like(every, -1)
    else:  # the cut's layer writes its caches for all rows, before some of them stop
        slots, compressed = step.pages[layer].window.slots, step.pages[layer].compressed.slots
    return LayerRows(*(t.numpy() for t in (kept, own.rows.positions, low, high, slots, compressed)))


def difference(policy: Policy, batch: Batch) -> str | None:
    """Where what the model builds for `batch` is not what the plan says, or None."""
    said, got = describe(policy, batch), built(policy, batch)
    for kind in KINDS:
        for field in fields(LayerRows):
            left, right = getattr(said[kind], field.name), getattr(got[kind], field.name)
            if not np.array_equal(left, right):
                return f"{policy.decoder}, {kind} layers: {field.name} of the model's step are not the plan's"
    return None
