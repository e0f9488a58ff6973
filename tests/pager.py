# SPDX-License-Identifier: Apache-2.0
"""A host in miniature: block pools and tables for the core, so that it can be cut at will without an engine."""

from __future__ import annotations

import random

import torch

from deepseek_v41_plugin.config import ModelConfig
from deepseek_v41_plugin.kernels.formats.records import cache_format
from deepseek_v41_plugin.model.model import Model
from deepseek_v41_plugin.model.step import LayerPages, Pages, Rows, Step


class Pager:
    """Caches for `requests` sequences of up to `length` tokens, with scattered block ids.

    Block 0 is the null block, as in vLLM.  Every cache starts poisoned with random bytes.
    """

    def __init__(self, model: Model, requests: int, length: int, block: int, seed: int):
        self.model, self.block, rng = model, block, random.Random(seed)
        cfg: ModelConfig = model.cfg
        acc = model.settings.accumulator
        self.device = model.embed.weight.device
        per_request = -(-length // block)
        ids = rng.sample(range(1, requests * per_request + 1), requests * per_request)
        self.table = torch.tensor(ids, dtype=torch.int32).view(requests, per_request)
        self.rings = torch.tensor(rng.sample(range(1, requests + 1), requests), dtype=torch.int32)[:, None]
        blocks = requests * per_request + 1
        generator = torch.Generator().manual_seed(seed)

        def bytes_(states: int, width: int) -> torch.Tensor:
            return torch.randint(0, 120, (blocks, states, width), dtype=torch.uint8, generator=generator)

        self.caches = {}
        records = cache_format(model.settings.cache, cfg.head_dim, cfg.qk_rope_head_dim, cfg.index_head_dim)
        for plan in cfg.layers:
            caches = {"window": bytes_(block, records.window.width)}
            if plan.is_kv_source:
                caches["compressed"] = bytes_(block // plan.ratio, records.compressed.width)
                caches["index"] = bytes_(block // plan.ratio, records.index.width)
                if plan.ratio == 2:
                    caches["ring"] = torch.full((requests + 1, 8, 2 * cfg.head_dim), 1e3, dtype=acc)
            self.caches[plan.index] = caches
        for caches in self.caches.values():
            caches.update({name: cache.to(self.device) for name, cache in caches.items()})
        self.table, self.rings = self.table.to(self.device), self.rings.to(self.device)
        self.tokens: dict[int, list[int]] = {r: [] for r in range(requests)}

    @torch.no_grad()
    def run(self, chunks: dict[int, list[int]], at: dict[int, int] | None = None) -> dict[int, torch.Tensor]:
        """Feed each request its chunk after what it already has (or from position `at`); logits [T, V] each."""
        n = self.model.cfg.engram_max_ngram_size
        start, positions, req, context, ids, ngrams = [0], [], [], [], [], []
        for r, chunk in chunks.items():
            done = (at or {}).get(r, len(self.tokens[r]))
            self.tokens[r] = self.tokens[r][:done] + chunk
            positions += range(done, done + len(chunk))
            req += [r] * len(chunk)
            ids += chunk
            context.append(done + len(chunk))
            start.append(len(ids))
            for p in range(done, done + len(chunk)):
                ngrams.append([self.tokens[r][p - b] if p >= b else -1 for b in range(n)])
        index = torch.tensor(list(chunks), device=self.device)
        local = {r: i for i, r in enumerate(chunks)}
        rows = Rows(self.on_device(positions), self.on_device([local[r] for r in req]), start, context)
        table = self.table[index]
        slot = table[rows.req, rows.positions // self.block].long() * self.block + rows.positions % self.block
        pages = {}
        for layer, caches in self.caches.items():
            paged = {
                name: Pages(cache, self.rings[index] if name == "ring" else table,
                            None if name == "ring" else slot, 8 if name == "ring" else self.block)
                for name, cache in caches.items()
            }
            pages[layer] = LayerPages(**paged)
        hidden = self.model(self.on_device(ids), Step(rows, pages), self.on_device(ngrams))
        logits = self.model.logits(hidden)
        return {r: logits[start[i] : start[i + 1]] for i, r in enumerate(chunks)}

    def on_device(self, values: list) -> torch.Tensor:
        return torch.tensor(values, device=self.device)
