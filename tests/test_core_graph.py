# SPDX-License-Identifier: Apache-2.0
"""Steps as a CUDA graph runs them: from tensors that stand where they are, with padding rows and padding requests."""

import random

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.kernels.moe import Replicas
from deepseek_v41_plugin.model.bounded import Bounds, bounded
from deepseek_v41_plugin.model.model import Model
from deepseek_v41_plugin.model.step import BlockRows, LayerPages, Pages, Rows, Step, requests_of
from deepseek_v41_plugin.replay import Policy, plan
from tests.core import load_core, load_core_draft, random_ids
from tests.pager import Pager

BLOCK, LENGTH, REQUESTS, ROWS, MOST = 8, 64, 6, 22, 4


@pytest.fixture(scope="module")
def folder(run_seed, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("graph") / "tiny", preset="tiny", seed=run_seed)


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return load_core(folder)


class Graph:
    """The step of a pager's model over standing tensors; `longest` is all the host knows of the sequences."""

    def __init__(self, host: Pager):
        self.host, self.model, self.bounds = host, host.model, Bounds.standing(REQUESTS, torch.device("cpu"))
        self.ids = torch.zeros(ROWS, dtype=torch.int64)
        self.positions, self.first = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(REQUESTS + 1, dtype=torch.int64)
        self.windows = torch.zeros(REQUESTS, host.windows.shape[1], dtype=torch.int32)
        self.table, self.rings = torch.zeros_like(self.windows), torch.zeros(REQUESTS, 1, dtype=torch.int32)
        self.window_slots, self.slots = (torch.full((ROWS,), -1, dtype=torch.int64) for _ in range(2))
        width = self.model.cfg.engram_columns * self.model.cfg.engram_head_dim
        self.memory = [torch.zeros(ROWS, width, dtype=self.model.settings.dtype) for _ in self.model.cfg.engram_layer_ids]

    def pages(self, layer: int) -> LayerPages:
        made = {}
        for name, cache in self.host.caches[layer].items():
            if name == "ring":
                made[name] = Pages(cache, self.rings, None, 8)
            elif name == "window":
                made[name] = Pages(cache, self.windows, self.window_slots, BLOCK)
            else:
                made[name] = Pages(cache, self.table, self.slots, BLOCK)
        return LayerPages(**made)

    @torch.no_grad()
    def run(self, chunks: dict[int, list[int]], policy: Policy, rng: random.Random) -> dict[int, torch.Tensor]:
        """As `Pager.run`, for requests that decode."""
        host, counts, ids, ngrams = self.host, {}, [], []
        for r, chunk in chunks.items():
            request = host.requests[r]
            counts[r] = len(request.tokens), len(chunk)
            request.tokens = request.tokens + chunk
            ids += chunk
            for p in range(counts[r][0], len(request.tokens)):
                ngrams.append([request.tokens[p - b] if p >= b else -1 for b in range(self.model.cfg.engram_max_ngram_size)])
        count, real = len(ids), len(chunks)
        # What a host leaves in padding: ids and positions of the step before, row offsets that have ended, the null block.
        self.ids.random_(0, 200, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        self.ids[:count] = torch.tensor(ids)
        positions = [p for begin, n in counts.values() for p in range(begin, begin + n)]
        self.positions[:count] = torch.tensor(positions)
        self.first.fill_(count)
        self.first[: real + 1] = torch.tensor([0, *torch.tensor([n for _, n in counts.values()]).cumsum(0).tolist()])
        index = torch.tensor(list(chunks))
        for mine, theirs in ((self.windows, host.windows), (self.table, host.table), (self.rings, host.rings)):
            mine.zero_()[:real] = theirs[index]
        req = requests_of(self.first[: real + 1], count)
        for slots, table in ((self.window_slots, host.windows), (self.slots, host.table)):
            block = table[index][req, torch.tensor(positions) // BLOCK].long()
            slots.fill_(-1)[:count] = block * BLOCK + torch.tensor(positions) % BLOCK
        for standing, found in zip(self.memory, self.model.recall(torch.tensor(ngrams)), strict=True):
            standing[:count] = found
        asked = [host.requests[r] for r in chunks]
        self.bounds.put(Bounds.of(plan(
            policy, first_position=[begin for begin, _ in counts.values()], rows=[n for _, n in counts.values()],
            prefill=[request.prefill for request in asked], replay_start=[request.replay_start for request in asked],
            whole=[request.whole for request in asked],
        ), torch.device("cpu")))
        hidden, features = self.replay()
        assert hidden.isfinite().all() and all(x.isfinite().all() for x in features)
        logits = self.model.logits(hidden)
        return {r: logits[self.first[i] : self.first[i + 1]] for i, r in enumerate(chunks)}

    def replay(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rows = Rows.padded(self.positions, self.first, LENGTH, MOST)
        step = Step(rows, {p.index: self.pages(p.index) for p in self.model.cfg.layers})
        step = bounded(step, self.model.cfg.last_kv_source, self.bounds)
        return self.model(self.ids, step, self.memory, self.model.cfg.dspark_target_layer_ids)


def twins(model: Model, rng: random.Random) -> tuple[Pager, Graph]:
    """Two hosts alike to the last byte, one of which replays a graph."""
    seed = rng.randrange(1 << 30)
    return Pager(model, REQUESTS, LENGTH, BLOCK, seed), Graph(Pager(model, REQUESTS, LENGTH, BLOCK, seed))


def check_caches(plain: Pager, host: Pager, behind: int | None = None) -> None:
    """Nothing but the rows' own bytes was written; what is sent to nowhere goes to block 0, which nobody reads.
    behind: the last layer that is compared."""
    for layer, caches in plain.caches.items():
        if behind is not None and layer > behind:
            continue
        for name, cache in caches.items():
            assert torch.allclose(cache[1:].double(), host.caches[layer][name][1:].double(), rtol=0, atol=1e-9), f"{name} of layer {layer}"


def test_decoding(model, run_rng):
    """1 to 4 rows a request, some requests only, fewer rows than the graph has, request by request the plain step's."""
    plain, graph = twins(model, run_rng)
    prompts = {r: random_ids(run_rng, model.cfg, run_rng.choice([1, 2, 7, 20])) for r in range(REQUESTS)}
    for host in (plain, graph.host):
        host.run(prompts)
    for step in range(6):
        some = run_rng.sample(range(REQUESTS), [1, 2, 5, REQUESTS, 3, REQUESTS][step])
        chunks = {r: random_ids(run_rng, model.cfg, run_rng.randrange(1, min(MOST, ROWS // len(some)) + 1)) for r in some}
        want, got = plain.run(chunks), graph.run(chunks, plain.policy, run_rng)
        for r in some:
            assert torch.allclose(got[r], want[r], rtol=0, atol=1e-9), f"step {step}, request {r}"
        check_caches(plain, graph.host)


def test_padding_is_no_load(model, run_rng):
    """Experts are counted for real rows only, in graphs of any number of them."""
    plain, graph = twins(model, run_rng)
    experts, k = model.cfg.n_routed_experts, model.cfg.num_experts_per_tok
    one = torch.arange(experts)
    rows = torch.zeros((), dtype=torch.int32)
    loads = [torch.zeros(experts, dtype=torch.int32) for _ in model.layers]
    for layer, load in zip(model.layers, loads, strict=True):
        layer.ffn.replicas = Replicas(one[:, None], torch.ones_like(one), load, torch.tensor(True), rows)
    try:
        for count in (1, 5, 20):
            graph.run({0: random_ids(run_rng, model.cfg, 1), 1: random_ids(run_rng, model.cfg, count)}, plain.policy, run_rng)
            assert [int(load.sum()) for load in loads] == [(count + 1) * k] * len(loads)
            for load in loads:
                load.zero_()
    finally:
        for layer in model.layers:
            layer.ffn.replicas = None


def test_drafts(folder, model, run_rng):
    """Blocks of some requests in a graph of more, the caches of the others untouched."""
    draft, block = load_core_draft(folder), 3
    seed = run_rng.randrange(1 << 30)
    plain, host = (Pager(model, REQUESTS, LENGTH, BLOCK, seed, draft) for _ in range(2))
    prompts = {r: random_ids(run_rng, model.cfg, run_rng.choice([1, 5, 20])) for r in range(REQUESTS)}
    for pager in (plain, host):
        pager.run(prompts)
    stages = [stage.plan.index for stage in draft.mtp]
    for some in (run_rng.sample(range(REQUESTS), n) for n in (1, 4, REQUESTS)):
        anchors = {r: random_ids(run_rng, model.cfg, 1)[0] for r in some}
        want = plain.propose(anchors, block)
        count, real = block * len(some), len(some)
        positions, first = torch.full((block * REQUESTS,), 7), torch.full((REQUESTS + 1,), count)
        positions[:count] = torch.tensor([len(prompts[r]) + i for r in some for i in range(block)])
        first[: real + 1] = torch.arange(real + 1) * block
        table = torch.zeros(REQUESTS, host.windows.shape[1], dtype=torch.int32)
        table[:real] = host.windows[torch.tensor(some)]
        slots = torch.full((block * REQUESTS,), -1)
        at = positions[:count]
        slots[:count] = table[torch.arange(count) // block, at // BLOCK].long() * BLOCK + at % BLOCK
        ids = torch.full((block * REQUESTS,), 3)
        ids[:count] = torch.tensor([t for a in anchors.values() for t in (a, *[model.cfg.dspark_noise_token_id] * (block - 1))])
        rows = BlockRows.padded(positions, first, LENGTH, block)
        rows = BlockRows(rows.positions, rows.req, rows.first, rows.start, rows.context, most=block, block=block)
        pages = {stage: LayerPages(Pages(host.caches[stage]["window"], table, slots, BLOCK)) for stage in stages}
        with torch.no_grad():
            hidden = draft(ids, model.embed, Step(rows, pages))
        assert hidden.isfinite().all()
        for i, r in enumerate(some):
            assert torch.allclose(draft.logits(hidden[i * block : (i + 1) * block], model.head), want[r][0], rtol=0, atol=1e-9), f"request {r}"
        low, high, _ = rows.window(model.cfg.sliding_window)
        assert (high[count:] == -1).all()
        for stage in stages:
            assert torch.equal(host.caches[stage]["window"][1:], plain.caches[stage]["window"][1:])


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_a_prompt_one_row_at_a_time(model, run_rng, mode):
    """Such rows run in a graph like decodes: after a hit that was rewound by a window, before and behind the decoder's
    cut.  A graph computes the rows that `compact` drops, and nobody reads them."""
    plain, graph = twins(model, run_rng)
    free = Graph(Pager(model, REQUESTS, LENGTH, BLOCK, 0))
    length, window = 30, model.cfg.sliding_window
    prompts = {r: random_ids(run_rng, model.cfg, length) for r in range(3)}
    for host in (plain, graph.host, free.host):
        host.policy = Policy(window, mode, 12, 3)
        host.run({r: ids[: 2 * window] for r, ids in prompts.items()})  # the prefix, as another request left it
        for r in prompts:
            request = host.requests[r]
            request.tokens, request.prefill, request.replay_start = request.tokens[:window], length, window
    differs = set()
    for at in range(window, length):
        row = {r: ids[at : at + 1] for r, ids in prompts.items()}
        want, got = plain.run(row), graph.run(row, plain.policy, run_rng)
        other = free.run(row, Policy(window, "off"), run_rng)
        check_caches(plain, graph.host, behind=None if mode == "mask" else model.cfg.last_kv_source)
        if mode == "mask" or at >= length - 12:
            for r in prompts:
                assert torch.allclose(got[r], want[r], rtol=0, atol=1e-9), f"position {at} of request {r}"
                differs |= {at} if (got[r] - other[r]).abs().max() > 1e-3 else set()
    assert differs, "the bounds change nothing here"
    graph.bounds.put(Bounds())
    assert not any(bound.any() for bound in (graph.bounds.held_from, graph.bounds.end, graph.bounds.decoder_from))
