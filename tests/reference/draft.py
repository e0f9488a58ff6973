# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft: one parallel block, a Markov chain over it, a confidence (facts 8)."""

from dataclasses import dataclass
from functools import partial

import torch

from .model import ReferenceModel, lead


@dataclass
class Proposal:
    """``k`` drafts for the positions after the anchor; everything float64.

    ``hidden`` [k, D]: the block's rows before the last norm. ``base_logits`` [k, V]: the head's.
    ``logits`` [k, V]: with the Markov term of the token before. ``tokens``: the best of each row,
    the lowest id among equals, and ``gaps``: their lead. ``confidence`` [k]: P(a draft is
    accepted if those before it are), temperature 1.
    """

    hidden: torch.Tensor
    base_logits: torch.Tensor
    logits: torch.Tensor
    tokens: list[int]
    gaps: list[float]
    confidence: torch.Tensor


class ReferenceDraft:
    """The draft of ``reference``'s checkpoint, with its switches and cache format."""

    def __init__(self, reference: ReferenceModel):
        self.reference = reference
        self.c, self.w, self.ops = reference.config, reference.weights, reference.ops
        self.attention = reference.attention
        self.stages = range(self.c.num_nextn_predict_layers)
        self.last = f"mtp.{self.stages[-1]}"

    def features(self, token_ids: list[int], **where) -> torch.Tensor:
        """Float64 [T, targets * D] of the target's rows; ``where`` as for ``reference.run``."""
        return self.reference.run(token_ids, **where).features

    @torch.no_grad()
    def propose(
        self,
        token_ids: list[int],
        anchor: int,
        *,
        k: int | None = None,
        features: torch.Tensor | None = None,
        window_start: int = 0,
        drafts: list[int] | None = None,
    ) -> Proposal:
        """``k`` drafts (default and at most dspark_block_size) after ``token_ids + [anchor]``.

        ``token_ids`` are the accepted tokens, the last of them at ``ap``; ``anchor`` is the token
        sampled for ap + 1. ``features``: rows of the last ``len(features)`` of ``token_ids``
        (default: a plain run's); they must reach down to max(window_start, ap - W + 1), the
        first context position. With ``drafts`` (k - 1 tokens or more) the Markov chain follows
        these instead of its own best tokens; any token may be drafted, the image token too.
        """
        c, ap = self.c, len(token_ids) - 1
        k = c.dspark_block_size if k is None else k
        if not 1 <= k <= c.dspark_block_size:
            raise ValueError(f"k: {k} is outside 1..{c.dspark_block_size}, dspark_block_size")
        if drafts is not None and len(drafts) < k - 1:
            raise ValueError(f"drafts: {len(drafts)} tokens. Give k - 1 = {k - 1} or more")
        if any(not 0 <= t < c.vocab_size for t in drafts or ()):
            raise ValueError(f"drafts: a token is outside 0..{c.vocab_size - 1}")
        anchor = self.reference._check([*token_ids, anchor])[-1]
        features = self.features(token_ids) if features is None else features
        first = max(window_start, ap - c.sliding_window + 1)
        if len(features) < ap + 1 - first:
            raise ValueError(
                f"features: {len(features)} rows. The context {first}..{ap} needs {ap + 1 - first}"
            )
        main = self.main_rows(features[len(features) - (ap + 1 - first) :])
        hidden = self.block(main, first, anchor, k)
        base = self.ops.norm(hidden, f"{self.last}.norm") @ self.w.matrix("head").T
        return self.chain(hidden, base, anchor, drafts)

    def main_rows(self, features: torch.Tensor) -> torch.Tensor:
        """[n, targets * D] to the rows [n, D] from which every stage makes its context KV."""
        return self.ops.norm(self.ops.linear("mtp.0.main_proj", features), "mtp.0.main_norm")

    def block(self, main: torch.Tensor, first: int, anchor: int, k: int) -> torch.Tensor:
        """Rows [k, D] before the last norm; ``main`` [n, D] is the context from ``first`` on."""
        X, pre = self.reference.embed([anchor, *[self.c.dspark_noise_token_id] * (k - 1)])
        for stage in self.stages:
            attend = partial(self.attend, f"mtp.{stage}.attn", main, first)
            top = self.c.dspark_num_experts_per_tok
            X, pre = self.ops.block(X, pre, f"mtp.{stage}", attend, top)
        return (pre[..., None] * X).sum(1)

    def attend(self, p: str, main: torch.Tensor, first: int, x: torch.Tensor) -> torch.Tensor:
        """``x`` [k, D] to [k, D]: every row sees the whole context and the whole block."""
        pos = torch.arange(first, first + len(main) + len(x), device=x.device)
        before, own = pos[: len(main)], pos[len(main) :]
        attention, rope = self.attention, self.attention.plain_rope
        q, _ = attention.queries(x, p, own, rope)
        context = attention.window_rows(main, p, before, rope)
        values = torch.cat([context, attention.window_rows(x, p, own, rope)])
        seen = torch.ones(len(x), len(values), dtype=torch.bool, device=x.device)
        o = attention.weigh(q, values, seen, self.w.plain(f"{p}.attn_sink"))
        return attention.output(o, p, own, rope)

    def chain(self, hidden, base, anchor: int, drafts: list[int] | None) -> Proposal:
        """The Markov term and the confidence, row by row."""
        embed = self.w.raw(f"{self.last}.markov_head.embed.weight")
        head = self.w.matrix(f"{self.last}.markov_head.head")
        score = self.w.matrix(f"{self.last}.confidence_head.proj")[0]
        previous, logits, tokens, gaps, confidence = anchor, [], [], [], []
        for i, row in enumerate(hidden):
            e = embed[previous].double()
            logits.append(base[i] + head @ e)
            confidence.append(torch.sigmoid(score @ torch.cat([row, e])))
            token, gap = lead(logits[-1])
            tokens.append(token)
            gaps.append(gap)
            previous = token if drafts is None or i >= len(drafts) else drafts[i]
        logits, confidence = torch.stack(logits), torch.stack(confidence)
        return Proposal(hidden, base, logits, tokens, gaps, confidence)
