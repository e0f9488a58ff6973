# SPDX-License-Identifier: Apache-2.0
"""The replay plan of one step: first window keys, replayed rows and dropped rows of each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MODES = ("off", "mask", "compact")


class ReplayError(ValueError):
    """A policy that cannot keep every decode row's window whole."""


@dataclass(frozen=True)
class Policy:
    """window W: keys a row sees, itself included.  drafts: the most drafts a step verifies.

    decoder: what the layers after the cut (the last KV source) do with prompt rows more than
    keep_tokens before the prompt's end.  off: all rows run, with whole windows; mask: all rows run,
    windows start at the kept ones; compact: the other rows stop at the cut.
    keep_tokens >= W + drafts + 1, so that a step's rows can be rolled back and the next row still
    has its whole window (v41-facts 10.3).  Raises ReplayError.
    """

    window: int
    decoder: str = "off"
    keep_tokens: int = 140
    drafts: int = 0

    def __post_init__(self) -> None:
        for name, low in (("window", 1), ("keep_tokens", 1), ("drafts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 31:
                raise ReplayError(f"{name}: {value!r} is not an integer from {low} to 2147483647. Correct it")
        if self.decoder not in MODES:
            raise ReplayError(f"decoder_replay: {self.decoder!r} is not a mode. Use one of {', '.join(MODES)}")
        least = self.window + self.drafts + 1
        if self.decoder != "off" and self.keep_tokens < least:
            raise ReplayError(
                f"keep_tokens: {self.keep_tokens} is too few. Keep at least {least}: "
                f"the window of {self.window}, {self.drafts} drafts and one row"
            )


@dataclass(frozen=True)
class Plan:
    """Positions int64 [R], one a request, and row counts; constant over a request's life but for `dropped`.

    window_start: first position with window KV, at layers up to the cut.  decoder_start: the same after
    the cut and in the draft's context.  replay_end: rows before it write window KV only, since their
    compressed rows and index keys lie in shared blocks.  dropped: this step's first rows that stop at the cut.
    """

    window_start: np.ndarray
    decoder_start: np.ndarray
    replay_end: np.ndarray
    dropped: np.ndarray


def plan(
    policy: Policy,
    *,
    first_position: np.ndarray,
    rows: np.ndarray,
    prefill: np.ndarray,
    replay_start: np.ndarray,
    whole: np.ndarray,
) -> Plan:
    """The plan of a step's requests, all arrays [R].

    first_position: position of a request's first row; rows: its row count (an upper bound for decodes
    that are trimmed on the device); prefill: tokens to prefill (the prompt; after a preemption the
    output so far too); replay_start: hit - W after a hit, which must be longer than W and end between
    two groups of the compressors, else 0; whole bool: every row's logits are wanted (prompt logprobs).

    A row at position p sees the window keys max(start, p - W + 1) .. p.  The kept rows are counted from
    the end of the prefill, not of the chunk: where chunks end changes nothing.  A decode row
    (p >= prefill) is never dropped and its window never narrowed.
    """
    first_position, rows, prefill, window_start = (
        np.array(a, dtype=np.int64) for a in (first_position, rows, prefill, replay_start)
    )
    replay_end = np.where(window_start > 0, window_start + policy.window, 0)
    decoder_start = window_start
    if policy.decoder != "off":
        kept = np.maximum(window_start, prefill - policy.keep_tokens)
        decoder_start = np.where(np.asarray(whole, dtype=bool), window_start, kept)
    dropped = np.zeros_like(rows)
    if policy.decoder == "compact":
        dropped = np.clip(decoder_start - first_position, 0, rows)
    return Plan(window_start, decoder_start, replay_end, dropped)
