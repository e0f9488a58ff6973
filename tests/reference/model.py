# SPDX-License-Identifier: Apache-2.0
"""The model: embedding, layers, head (facts 3), and what tests ask of it."""

from functools import partial
from pathlib import Path

import torch

from .attention import Attention
from .engram import Engram
from .layers import Ops
from .runs import Replay, Run, Span
from .weights import Layer, Weights, plan_layers, read_config


class ReferenceModel:
    """Float64 forward of a checkpoint directory, one sequence at a time, without any cache.

    ``activation_quant``, ``kv_quant`` and ``index_quant`` turn the three kinds of rounding off.
    ``kv_format``: "v41" (fp8 window rows, FP4 global rows and index keys) or "v4" (584 B records
    for both, FP8 index rows). ``cache_weights=False`` decodes each weight when it is used.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        *,
        activation_quant: bool = True,
        kv_quant: bool = True,
        index_quant: bool = True,
        kv_format: str = "v41",
        cache_weights: bool = True,
        device: str = "cpu",
    ):
        if kv_format not in ("v41", "v4"):
            raise ValueError(f"kv_format: {kv_format!r} is unknown. Use 'v41' or 'v4'")
        directory = Path(checkpoint_dir)
        self.config = c = read_config(directory)
        self.layers = plan_layers(c)
        self.targets = getattr(c, "dspark_target_layer_ids", [])  # layers that feed the draft
        self.weights = Weights(directory, c.tile, device, cache_weights)
        self.ops = Ops(c, self.weights, activation_quant)
        self.attention = Attention(c, self.weights, self.ops, kv_quant, index_quant, kv_format)
        self.engram = Engram(c, directory, self.weights) if c.engram_layer_ids else None

    def _check(self, token_ids: list[int]) -> list[int]:
        ids = [int(t) for t in token_ids]
        if not ids:
            raise ValueError("token_ids: empty. Give at least one token")
        if self.config.image_token_id in ids:
            raise ValueError("token_ids: holds the image token. The reference reads text only")
        bad = [t for t in ids if not 0 <= t < self.config.vocab_size]
        if bad:
            raise ValueError(f"token_ids: {bad[0]} is outside 0..{self.config.vocab_size - 1}")
        return ids

    def embed(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's stream [T, hc, D] and its mix [T, hc], which takes copy 0."""
        index = torch.tensor(ids, device=self.weights.device)
        X = self.weights.raw("embed.weight")[index].double()[:, None]
        X = X.repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros_like(X[..., 0])
        pre[:, 0] = 1
        return X, pre

    @torch.no_grad()
    def run(
        self,
        token_ids: list[int],
        *,
        replay: Replay | None = None,
        decoder_start: int = 0,
        notes: list[dict] | None = None,
    ) -> Run:
        """The layers over ``token_ids``; ``notes`` collects what ``trace`` returns.

        ``replay``: compute the rows from ``replay.start`` on, on top of a prefix-cache hit.
        ``decoder_start``: in the layers after the last KV source no window reaches below this
        position; rows below it read global rows and the sink only (facts 10.3, mask).
        """
        c, ids = self.config, self._check(token_ids)
        replay = Replay(0, 0) if replay is None else replay
        replay.check(c, len(ids))
        pos = torch.arange(replay.start, len(ids), device=self.weights.device)
        cut = max(c.kv_source_layer_ids, default=c.num_hidden_layers)
        span = Span(pos, cut, replay, decoder_start)
        X, pre = self.embed(ids[replay.start :])
        features = {}
        for layer in self.layers:
            note = {"layer": layer.index}
            if layer.engram is not None:
                rows = self.engram.rows(ids, layer.engram)[replay.start :].to(X.device)
                X = self.engram.inject(X, rows, layer.index, self.ops.linear, self.ops.rms)
                note["engram_rows"] = rows
            note["stream_in"] = X
            if layer.index in self.targets:
                features[layer.index] = X.mean(1)
            X, pre = self.layer(layer, X, pre, span, note)
            note["stream_out"] = X
            if notes is not None:
                if layer.ratio:
                    choice = span.choices[layer.index_source]
                    note["selected"] = choice.rows(c.index_topk)
                    note["scores"] = choice.scores
                    note["candidate_blocks"] = choice.blocks
                notes.append(note)
        features = torch.cat([features[t] for t in self.targets], 1) if self.targets else None
        hidden = self.ops.collapse(X, pre, "norm")
        return Run(replay.start, hidden, span.published, features)

    def layer(self, layer: Layer, X, pre, span: Span, note: dict | None = None):
        """One backbone layer after its Engram; returns the next (X, pre)."""
        attend = partial(self.attention, layer=layer, span=span)
        k = self.config.num_experts_per_tok
        return self.ops.block(X, pre, f"layers.{layer.index}", attend, k, note)

    # Below, ``where`` are ``replay`` and ``decoder_start`` of ``run``. With a replay, T counts
    # the rows from ``replay.start`` on.

    def hidden(self, token_ids: list[int], **where) -> torch.Tensor:
        """The head's input, float64 [T, hidden_size]."""
        return self.run(token_ids, **where).hidden

    def logits(self, token_ids: list[int], **where) -> torch.Tensor:
        """Logits of every position, float64 [T, vocab_size]."""
        return self.hidden(token_ids, **where) @ self.weights.matrix("head").T

    def logprobs(self, token_ids: list[int], **where) -> torch.Tensor:
        """Log probabilities of the token after every position, float64 [T, vocab_size]."""
        return self.logits(token_ids, **where).log_softmax(-1)

    def trace(self, token_ids: list[int], **where) -> list[dict]:
        """One dict per layer, for debugging.

        ``stream_in`` (after Engram), ``stream_mid`` (after attention), ``stream_out``
        [T, hc, D]; ``experts`` [T, k]; on Engram layers ``engram_rows`` [T, columns]; on layers
        with global rows ``selected`` [T, index_topk] ascending padded with -1, ``scores`` [T, n]
        and ``candidate_blocks`` (of the candidate source, else None).
        """
        notes: list[dict] = []
        self.run(token_ids, notes=notes, **where)
        return notes

    def greedy(self, prompt: list[int], n: int, **where) -> tuple[list[int], list[float]]:
        """``n`` greedy tokens (the lowest id among equals), recomputing everything each time.

        Also returns, for each, by how much its logit leads the runner-up's.
        """
        tokens, gaps = list(prompt), []
        for _ in range(n):
            row = self.hidden(tokens, **where)[-1] @ self.weights.matrix("head").T
            token, gap = lead(row)
            tokens.append(token)
            gaps.append(gap)
        return tokens[len(prompt) :], gaps

    def check_greedy(
        self, prompt: list[int], tokens: list[int], **where
    ) -> tuple[list[int], list[float]]:
        """What greedy decoding gives at each step of ``prompt + tokens``, in one forward.

        Equal to ``greedy`` as long as ``tokens`` are its own: after the first difference the
        answers are conditioned on ``tokens``.
        """
        rows = self.logits([*prompt, *tokens[:-1]], **where)[-len(tokens) :]
        leads = [lead(row) for row in rows]
        return [t for t, _ in leads], [g for _, g in leads]


def lead(row: torch.Tensor) -> tuple[int, float]:
    """(lowest index of the largest logit, its lead over the second largest)."""
    top = row.topk(2).values
    return int((row == top[0]).nonzero()[0, 0]), float(top[0] - top[1])
