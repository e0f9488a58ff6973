# SPDX-License-Identifier: Apache-2.0
"""Bounded replay of a step: its plan put on the device, and onto the step's pages.  (v41-facts 10)"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..replay import Plan
from .step import Decoder, LayerPages, Pages, Step


@dataclass
class Bounds:
    """A `replay.Plan` on the device, int64 [R]; None where it changes nothing.

    held_from: first positions with window KV up to the last KV source; end: rows before it write
    window KV only; decoder_from: as held_from, after the last KV source; dropped: rows of each request
    that stop there, on the host.
    """

    held_from: torch.Tensor | None = None
    end: torch.Tensor | None = None
    decoder_from: torch.Tensor | None = None
    dropped: list[int] | None = None

    @classmethod
    def standing(cls, requests: int, device: torch.device) -> Bounds:
        """Bounds that stay where they are, for a CUDA graph; at first they change nothing."""
        return cls(*(torch.zeros(requests, dtype=torch.int64, device=device) for _ in range(3)))

    def put(self, other: Bounds) -> None:
        """Standing bounds take what `other` says, but for dropped rows: a graph computes them, unread."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.zero_()
            if theirs is not None:
                mine[: theirs.shape[0]] = theirs
        if other.decoder_from is None and other.held_from is not None:
            self.decoder_from[: other.held_from.shape[0]] = other.held_from

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.held_from, self.end, self.decoder_from

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> Bounds:
        bounds = cls()
        if plan.window_start.any():
            bounds.held_from = torch.from_numpy(plan.window_start).to(device, non_blocking=True)
            bounds.end = torch.from_numpy(plan.replay_end).to(device, non_blocking=True)
        if (plan.decoder_start > plan.window_start).any():
            bounds.decoder_from = torch.from_numpy(plan.decoder_start).to(device, non_blocking=True)
            if plan.dropped.any():
                bounds.dropped = plan.dropped.tolist()
        return bounds


def bounded(step: Step, cut: int, bounds: Bounds) -> Step:
    """`step` under `bounds`; cut: the last KV source's layer."""
    pages = step.pages
    if bounds.held_from is not None:
        replayed = step.rows.positions < bounds.end[step.rows.req]
        masked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        pages = {layer: _replayed(own, replayed, bounds.held_from, masked) for layer, own in pages.items()}
    step = Step(step.rows, pages)
    if bounds.decoder_from is not None:
        step.decoder = _decoder(step, cut, bounds.decoder_from, bounds.dropped)
    return step


def _replayed(
    pages: LayerPages, replayed: torch.Tensor, held_from: torch.Tensor, masked: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> LayerPages:
    """Compressed rows and index keys of replayed rows lie in blocks that other requests share.

    masked: slots that layers share, by their id, and the same without replayed rows.
    """

    def kept(own: Pages | None) -> Pages | None:
        if own is None:
            return None
        if id(own.slots) not in masked:
            masked[id(own.slots)] = own.slots, own.slots.masked_fill(replayed, -1)
        return replace(own, slots=masked[id(own.slots)][1])

    window = replace(pages.window, held_from=held_from)
    return replace(pages, window=window, compressed=kept(pages.compressed), index=kept(pages.index))


def _decoder(step: Step, cut: int, held_from: torch.Tensor, dropped: list[int] | None) -> Decoder:
    kept, rows = (None, step.rows) if dropped is None else step.rows.tail(dropped)
    pages = {}
    for layer, own in step.pages.items():
        if layer < cut:
            continue
        window = own.window
        slots = window.slots if kept is None else window.slots[kept]
        window = replace(window, slots=slots, held_from=window.held_from if layer == cut else held_from)
        pages[layer] = replace(own, window=window)
    return Decoder(kept, Step(rows, pages))
