# SPDX-License-Identifier: Apache-2.0
"""What users see of a rebalancer: counts that only grow, and its last words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """state: idle, load, plan, move, commit, off.  generation: the step of the last `begin` that the worker took up.

    generations: taken up; finished: to the last layer; superseded: by a newer one; failures: given up for another
    reason.  layers, experts, bytes: changed layers, and what this rank sent to others for them.
    seconds: in generations; last_seconds: in the last one.  watchdog: waits that took too long; last_problem: the last
    failure's or watchdog's text.
    """

    state: str = "idle"
    generation: int = -1
    generations: int = 0
    finished: int = 0
    superseded: int = 0
    failures: int = 0
    layers: int = 0
    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0
    watchdog: int = 0
    last_problem: str = ""
