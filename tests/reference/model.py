# SPDX-License-Identifier: Apache-2.0
"""The model: embedding, layers, head (facts 3), and what tests ask of it."""

from pathlib import Path

import torch

from .attention import Attention
from .engram import Engram
from .layers import Ops
from .weights import Weights, plan_layers, read_config


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

    @torch.no_grad()
    def _forward(self, token_ids: list[int], trace: list[dict] | None = None) -> torch.Tensor:
        """Final hidden rows [T, D], after the last norm."""
        c, ops = self.config, self.ops
        ids = self._check(token_ids)
        index = torch.tensor(ids, device=self.weights.device)
        X = self.weights.raw("embed.weight")[index].double()[:, None].repeat(1, c.hc_mult, 1)
        pre = torch.zeros_like(X[..., 0])
        pre[:, 0] = 1
        published, choices = {}, {}
        for layer in self.layers:
            p, note = f"layers.{layer.index}", {"layer": layer.index}
            if layer.engram is not None:
                rows = self.engram.rows(ids, layer.engram).to(X.device)
                X = self.engram.inject(X, rows, layer.index, ops.linear, ops.rms)
                note["engram_rows"] = rows
            note["stream_in"] = X

            next_pre, post, comb = ops.mix(X, f"{p}.hc_attn")
            h = ops.collapse(X, pre, f"{p}.attn_norm")
            y = self.attention(h, layer, published, choices)
            X, pre = ops.spread(X, y, post, comb), next_pre
            note["stream_mid"] = X

            next_pre, post, comb = ops.mix(X, f"{p}.hc_ffn")
            h = ops.collapse(X, pre, f"{p}.ffn_norm")
            y, note["experts"] = ops.moe(h, f"{p}.ffn")
            X, pre = ops.spread(X, y, post, comb), next_pre
            note["stream_out"] = X

            if trace is not None:
                if layer.ratio:
                    choice = choices[layer.index_source]
                    note["selected"] = choice.rows(c.index_topk)
                    note["scores"] = choice.scores
                    note["candidate_blocks"] = choice.blocks
                trace.append(note)
        return ops.collapse(X, pre, "norm")

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """The head's input, float64 [T, hidden_size]."""
        return self._forward(token_ids)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of every position, float64 [T, vocab_size]."""
        return self._forward(token_ids) @ self.weights.matrix("head").T

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log probabilities of the token after every position, float64 [T, vocab_size]."""
        return self.logits(token_ids).log_softmax(-1)

    def trace(self, token_ids: list[int]) -> list[dict]:
        """One dict per layer, for debugging.

        ``stream_in`` (after Engram), ``stream_mid`` (after attention), ``stream_out``
        [T, hc, D]; ``experts`` [T, k]; on Engram layers ``engram_rows`` [T, columns]; on layers
        with global rows ``selected`` [T, index_topk] ascending padded with -1, ``scores`` [T, n]
        and ``candidate_blocks`` (of the candidate source, else None).
        """
        notes: list[dict] = []
        self._forward(token_ids, notes)
        return notes

    def greedy(self, prompt: list[int], n: int) -> tuple[list[int], list[float]]:
        """``n`` greedy tokens (the lowest id among equals), recomputing everything each time.

        Also returns, for each, by how much its logit leads the runner-up's.
        """
        tokens, gaps = list(prompt), []
        for _ in range(n):
            row = self._forward(tokens)[-1] @ self.weights.matrix("head").T
            token, gap = lead(row)
            tokens.append(token)
            gaps.append(gap)
        return tokens[len(prompt) :], gaps

    def check_greedy(self, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
        """What greedy decoding gives at each step of ``prompt + tokens``, in one forward.

        Equal to ``greedy`` as long as ``tokens`` are its own: after the first difference the
        answers are conditioned on ``tokens``.
        """
        rows = self.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        leads = [lead(row) for row in rows]
        return [t for t, _ in leads], [g for _, g in leads]


def lead(row: torch.Tensor) -> tuple[int, float]:
    """(lowest index of the largest logit, its lead over the second largest)."""
    top = row.topk(2).values
    return int((row == top[0]).nonzero()[0, 0]), float(top[0] - top[1])
