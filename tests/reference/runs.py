# SPDX-License-Identifier: Apache-2.0
"""Which rows a run computes and which keys they see: bounded replay (facts 10)."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


@dataclass
class GlobalRows:
    """What a KV source publishes: ``kv`` [n, dh] and ``key`` [n, index_head_dim], as stored."""

    kv: torch.Tensor
    key: torch.Tensor


@dataclass(frozen=True)
class Replay:
    """A prefix-cache hit of ``hit`` tokens whose window KV is lost.

    Only rows at positions ``start`` and above are computed, and no window reaches below
    ``start``. Global rows of the hit are those of ``cached`` (by KV source: ``Run.published`` of
    an earlier run, of which at least ``hit`` tokens were the same); rows after it are new.
    """

    start: int
    hit: int
    cached: dict[int, GlobalRows] = field(default_factory=dict)

    def check(self, config: SimpleNamespace, tokens: int):
        """ValueError unless a run over ``tokens`` tokens can use this."""
        if not 0 <= self.start <= self.hit < tokens:
            raise ValueError(
                f"replay: start {self.start}, hit {self.hit} of {tokens} tokens. "
                "Use 0 <= start <= hit < tokens"
            )
        for source in config.kv_source_layer_ids if self.hit else ():
            ratio = config.compress_ratios[source]
            if self.hit % ratio:
                raise ValueError(f"replay: hit {self.hit} splits a group. Use a multiple of {ratio}")
            rows = len(self.cached[source].kv) if source in self.cached else 0
            if rows < self.hit // ratio:
                raise ValueError(
                    f"replay: cached holds {rows} rows of layer {source}, "
                    f"hit needs {self.hit // ratio}. Give `published` of a longer run"
                )


@dataclass
class Span:
    """The state of one run. ``pos`` int64 [T]: consecutive absolute positions of its rows.

    ``published`` (by KV source) and ``choices`` (by index source) grow as layers run.
    """

    pos: torch.Tensor
    cut: int  # last KV source: the layers after it are the decoder
    replay: Replay = Replay(0, 0)
    decoder_start: int = 0
    published: dict[int, GlobalRows] = field(default_factory=dict)
    choices: dict = field(default_factory=dict)

    def window_start(self, layer: int) -> int:
        """The first position that this layer's windows may reach."""
        return max(self.replay.start, self.decoder_start if layer > self.cut else 0)


@dataclass
class Run:
    """What a run gave for positions ``start`` and above (T of them).

    ``hidden`` float64 [T, D]: the head's input. ``published``: all global rows of the sequence,
    cached ones included, by KV source. ``features`` float64 [T, targets * D], or None without a
    draft: the stream at the entry of each target layer, mean over copies, in config order.
    """

    start: int
    hidden: torch.Tensor
    published: dict[int, GlobalRows]
    features: torch.Tensor | None
