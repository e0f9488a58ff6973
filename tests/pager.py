# SPDX-License-Identifier: Apache-2.0
"""A host in miniature: block pools and tables for the core, so that it can be cut at will without an engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from deepseek_v41_plugin.config import ModelConfig
from deepseek_v41_plugin.kernels.formats.records import cache_format
from deepseek_v41_plugin.model.bounded import Bounds, bounded
from deepseek_v41_plugin.model.draft import Draft
from deepseek_v41_plugin.model.model import Model
from deepseek_v41_plugin.model.step import BlockRows, LayerPages, Pages, Rows, Step, requests_of
from deepseek_v41_plugin.replay import Policy, plan


@dataclass
class Request:
    """tokens: those whose rows were computed; prefill, replay_start, whole: see `replay.plan`."""

    tokens: list[int]
    prefill: int = 0
    replay_start: int = 0
    whole: bool = False


class Pager:
    """Caches for `requests` sequences of up to `length` tokens, with scattered block ids.

    Block 0 is the null block, as in vLLM.  Every cache starts poisoned with random bytes.
    """

    def __init__(self, model: Model, requests: int, length: int, block: int, seed: int, draft: Draft | None = None):
        self.model, self.draft, self.block, rng = model, draft, block, random.Random(seed)
        cfg: ModelConfig = model.cfg
        acc = model.settings.accumulator
        self.device = model.embed.weight.device
        per_request = -(-length // block)

        def table() -> torch.Tensor:
            ids = rng.sample(range(1, requests * per_request + 1), requests * per_request)
            return torch.tensor(ids, dtype=torch.int32, device=self.device).view(requests, per_request)

        # Windows and compressed rows lie in groups of their own.
        self.windows, self.table = table(), table()
        self.rings = self.on_device(rng.sample(range(1, requests + 1), requests)).int()[:, None]
        blocks = requests * per_request + 1
        generator = torch.Generator().manual_seed(seed)

        def bytes_(states: int, width: int) -> torch.Tensor:
            return torch.randint(0, 120, (blocks, states, width), dtype=torch.uint8, generator=generator).to(self.device)

        self.caches = {}
        records = cache_format(model.settings.cache, cfg.head_dim, cfg.qk_rope_head_dim, cfg.index_head_dim)
        for plan_ in (*cfg.layers, *([] if draft is None else [stage.plan for stage in draft.mtp])):
            caches = {"window": bytes_(block, records.window.width)}
            if plan_.is_kv_source:
                caches["compressed"] = bytes_(block // plan_.ratio, records.compressed.width)
                caches["index"] = bytes_(block // plan_.ratio, records.index.width)
                if plan_.ratio == 2:
                    ring = torch.full((requests + 1, 8, 2 * cfg.head_dim), 1e3, dtype=acc)
                    caches["ring"] = ring.to(self.device)
            self.caches[plan_.index] = caches
        self.requests = {r: Request([]) for r in range(requests)}
        self.policy = Policy(cfg.sliding_window)
        self.slack = 0  # how much too long the sequence lengths on the host are

    def on_device(self, values: list) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def rows(self, counts: dict[int, tuple[int, int]], kind=Rows, **more) -> Rows:
        """Of each request (position of its first row, rows)."""
        start, positions = [0], []
        for begin, count in counts.values():
            positions += range(begin, begin + count)
            start.append(len(positions))
        first = self.on_device(start)
        context = [begin + count for begin, count in counts.values()]
        return kind(self.on_device(positions), requests_of(first, start[-1]), first, start, context, **more)

    def pages(self, layer: int, rows: Rows, index: torch.Tensor) -> LayerPages:
        made = {}
        for name, cache in self.caches[layer].items():
            if name == "ring":
                made[name] = Pages(cache, self.rings[index], None, 8)
                continue
            table = (self.windows if name == "window" else self.table)[index]
            slots = table[rows.req, rows.positions // self.block].long() * self.block + rows.positions % self.block
            made[name] = Pages(cache, table, slots, self.block)
        return LayerPages(**made)

    @torch.no_grad()
    def run(self, chunks: dict[int, list[int]], at: dict[int, int] | None = None, ragged: int = 0) -> dict[int, torch.Tensor]:
        """Feed each request its chunk after what it already has (or from position `at`); logits [T, V] each.

        ragged: of that many leading requests the row counts on the host are wrong (their sum is right).
        With a draft the context KV of all rows is written too.
        """
        n, counts, ids, ngrams = self.model.cfg.engram_max_ngram_size, {}, [], []
        for r, chunk in chunks.items():
            request = self.requests[r]
            done = (at or {}).get(r, len(request.tokens))
            request.tokens = request.tokens[:done] + chunk
            counts[r] = done, len(chunk)
            ids += chunk
            for p in range(done, done + len(chunk)):
                ngrams.append([request.tokens[p - b] if p >= b else -1 for b in range(n)])
        rows, index = self.rows(counts), self.on_device(list(chunks))
        true_start = list(rows.start)
        if ragged:
            rows.ragged = ragged
            rows.start[1:ragged] = np.linspace(0, rows.start[ragged], ragged + 1).astype(int)[1:-1].tolist()
        rows.context = [context + self.slack for context in rows.context]
        step = Step(rows, {plan_.index: self.pages(plan_.index, rows, index) for plan_ in self.model.cfg.layers})
        asked = [self.requests[r] for r in chunks]
        step = bounded(step, self.model.cfg.last_kv_source, Bounds.of(plan(
            self.policy, first_position=[done for done, _ in counts.values()], rows=[count for _, count in counts.values()],
            prefill=[request.prefill for request in asked], replay_start=[request.replay_start for request in asked],
            whole=[request.whole for request in asked],
        ), self.device))
        targets = self.model.cfg.dspark_target_layer_ids if self.draft else ()
        hidden, features = self.model(self.on_device(ids), step, self.model.recall(self.on_device(ngrams)), targets)
        if self.draft:
            main_x = self.draft.combine(torch.cat(features, -1))
            stages = [self.pages(stage.plan.index, rows, index).window for stage in self.draft.mtp]
            self.draft.store_context(main_x, rows.positions, stages)
        logits = self.model.logits(hidden)
        return {r: logits[true_start[i] : true_start[i + 1]] for i, r in enumerate(chunks)}

    @torch.no_grad()
    def propose(self, anchors: dict[int, int], k: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The block pass behind each request's tokens: (logits [k, V] before the Markov shift, hidden [k, D])."""
        cfg = self.model.cfg
        rows = self.rows({r: (len(self.requests[r].tokens), k) for r in anchors}, BlockRows, block=k)
        index = self.on_device(list(anchors))
        step = Step(rows, {stage.plan.index: self.pages(stage.plan.index, rows, index) for stage in self.draft.mtp})
        ids = [token for anchor in anchors.values() for token in [anchor] + [cfg.dspark_noise_token_id] * (k - 1)]
        hidden = self.draft(self.on_device(ids), self.model.embed, step)
        logits = self.draft.logits(hidden, self.model.head)
        return {r: (logits[i * k : i * k + k], hidden[i * k : i * k + k]) for i, r in enumerate(anchors)}
