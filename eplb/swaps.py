# SPDX-License-Identifier: Apache-2.0
"""Exchanges of slots between ranks that lower the heaviest rank, all layers at once (L, P, R as in maps.py)."""

from __future__ import annotations

import numpy as np

from .balance import slot_loads
from .maps import held


def lower_peaks(load: np.ndarray, given: np.ndarray, ranks: int, target: np.ndarray, rounds: int) -> np.ndarray:
    """`given`, a map int64 [L, P], after exchanges that suit a load float64 [L, E].

    target float64 [L]: a layer is left alone once no rank is heavier.
    A round pairs the heaviest rank with the lightest, the next with the next, and exchanges in each pair
    whose heavier rank is over the target the two slots that lower that rank's maximum most.  Where the heaviest
    rank gains nothing, one exchange with any other rank is sought instead.  A layer ends when there is none,
    and all after 2 * `rounds`.  The largest rank load of a layer never rises.  No expert is brought to a rank that has it:
    replicas apart share what the next window brings.
    """
    layers, physical = given.shape
    if ranks in (1, physical):
        return given.copy()
    state = _State(load, given, ranks)
    active = np.flatnonzero(state.loads.max(1) > target)
    for step in (_pairs, _any):
        stuck = []
        for _ in range(rounds):
            if not len(active):
                break
            helped = step(state, active, target[active])
            stuck.append(active[~helped])
            active = active[helped & (state.loads[active].max(1) > target[active])]
        active = np.concatenate([*stuck, active])
    return state.experts.reshape(layers, physical)


class _State:
    """experts int64 and slots float64 [L, R, local]: what lies where and what it carries; loads [L, R]; held bool [L, R, E]."""

    def __init__(self, load: np.ndarray, given: np.ndarray, ranks: int):
        self.experts = given.reshape(len(given), ranks, -1).copy()
        self.slots = slot_loads(load, given).reshape(self.experts.shape)
        self.loads = self.slots.sum(2)
        self.held = held(given, load.shape[1], ranks)

    def exchange(self, layer, heavy, i, light, j) -> None:
        """Slot i of rank heavy with slot j of rank light, [N] each, no rank twice."""
        moved = self.slots[layer, heavy, i] - self.slots[layer, light, j]
        self.loads[layer, heavy] -= moved
        self.loads[layer, light] += moved
        for array in (self.slots, self.experts):
            array[layer, heavy, i], array[layer, light, j] = array[layer, light, j], array[layer, heavy, i]
        for rank in (heavy, light):
            self.held[layer, rank] = False
            self.held[layer[:, None], rank[:, None], self.experts[layer, rank]] = True


def _pairs(state: _State, active, target) -> np.ndarray:
    """A round in the active layers; bool: was the heaviest rank lowered."""
    loads = state.loads[active]
    ranks = loads.shape[1]
    by_load = np.argsort(loads, axis=1, kind="stable")
    light, heavy = by_load[:, : ranks // 2], by_load[:, : -(ranks // 2) - 1 : -1]
    n, k = np.nonzero(np.take_along_axis(loads, heavy, 1) > target[:, None])
    layer, heavy, light = active[n], heavy[n, k], light[n, k]
    gap = loads[n, heavy] - loads[n, light]
    there = state.held[layer[:, None], light[:, None], state.experts[layer, heavy]]
    here = state.held[layer[:, None], heavy[:, None], state.experts[layer, light]]
    give = np.where(there, -np.inf, state.slots[layer, heavy])
    take = np.where(here, np.inf, state.slots[layer, light])
    best, good = _best(give[:, :, None] - take[:, None, :], gap[:, None, None], loads[n, heavy])
    i, j = np.divmod(best, take.shape[1])
    state.exchange(layer[good], heavy[good], i[good], light[good], j[good])
    return good[k == 0]


def _any(state: _State, active, target) -> np.ndarray:
    """One exchange of the heaviest rank with the best other rank in each active layer; bool: did it help."""
    loads, n = state.loads[active], np.arange(len(active))
    heavy = loads.argmax(1)
    gap = loads[n, heavy][:, None] - loads
    mine = state.experts[active, heavy]  # [A, local]
    there = np.take_along_axis(state.held[active], mine[:, None, :], 2)  # [A, R, local]
    here = np.take_along_axis(state.held[active, heavy][:, None, :], state.experts[active], 2)
    give = np.where(there, -np.inf, state.slots[active, heavy][:, None, :])
    take = np.where(here, np.inf, state.slots[active])
    best, good = _best(give[:, :, :, None] - take[:, :, None, :], gap[:, :, None, None], loads[n, heavy])
    light, i, j = np.unravel_index(best, (*give.shape[1:], take.shape[2]))
    state.exchange(active[good], heavy[good], i[good], light[good], j[good])
    return good


def _best(gain, gap, peak):
    """(flat index of the best exchange, does it help) [N]: `gain` [N, ...] is what the heavy rank loses, of a lead `gap`."""
    np.minimum(gain, gap - gain, out=gain)
    gain = gain.reshape(len(gain), -1)
    best = gain.argmax(1)
    return best, gain[np.arange(len(gain)), best] > 1e-9 * peak
