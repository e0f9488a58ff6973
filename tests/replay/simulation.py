# SPDX-License-Identifier: Apache-2.0
"""A host and its caches as dictionaries: who wrote what, for which tokens, in which life of the request.

Nothing here knows how a plan is made; it does what the plan says and checks what a row finds.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from deepseek_v41_plugin.replay import MODES, plan


@dataclass
class Request:
    """tokens: prompt and output; first: tokens with KV, the next row's position; table: blocks of compressed rows."""

    name: int
    tokens: list[int]
    whole: bool
    outputs: int
    prefill: int = 0
    life: int = 0
    replay_start: int = 0
    hit: int = 0
    first: int = 0
    running: bool = False
    table: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    rows: int = 0


def hashes_of(tokens: list[int]) -> list[int]:
    """What identifies the KV of each position: the tokens up to it."""
    out, last = [], 0
    for token in tokens:
        last = hash((last, token))
        out.append(last)
    return out


class Caches:
    """One mode's caches.  window[kind][request, position] and compressed[block, offset]: (life, hash of tokens)."""

    def __init__(self):
        self.window = {kind: {} for kind in ("encoder", "cut", "later")}
        self.compressed = {}

    def free(self, name: int, below: int | None = None) -> None:
        """The request's window keys go: all, or those at positions under `below`."""
        for cache in self.window.values():
            for key in [k for k in cache if k[0] == name and (below is None or k[1] < below)]:
                del cache[key]


class Simulation:
    """Requests that come, are hit, chunked, rolled back and preempted; every mode computes the same schedule."""

    def __init__(self, rng, policy, block_size: int, longest: int, preempt: float = 0.1):
        self.rng, self.policy, self.block_size, self.longest, self.preempt = rng, policy, block_size, longest, preempt
        self.families = [rng.integers(0, 9, longest).tolist() for _ in range(2)]
        self.requests, self.cached, self.blocks, self.names = [], {}, 0, 0
        self.caches = {mode: Caches() for mode in MODES}
        self.seen = Counter()

    def step(self) -> None:
        rng = self.rng
        while len(self.requests) < 6:
            self.arrive()
        for r in self.requests:
            if r.running and rng.random() < self.preempt:
                self.seen["preempted in a replay"] += r.first < r.replay_start + self.policy.window and r.replay_start > 0
                r.running, r.first, r.table = False, 0, []
                for caches in self.caches.values():
                    caches.free(r.name)
        for key in [k for k in self.cached if rng.random() < 0.02]:
            del self.cached[key]
        batch = [r for r in rng.permutation(np.array(self.requests, dtype=object)) if rng.random() < 0.8]
        for r in batch:
            self.schedule(r)
        if batch:
            self.forward(batch)
        for r in batch:
            self.accept(r)
        self.requests = [r for r in self.requests if r.outputs > 0]

    def arrive(self) -> None:
        rng, family = self.rng, self.families[self.rng.integers(2)]
        # Short ones, and ones that continue a family's text.
        shared = int(rng.integers(0, self.longest + 1))
        length = int(rng.integers(1, self.longest + 1)) if rng.random() < 0.7 else int(rng.integers(1, self.policy.window + 2))
        prompt = (family[:shared] + rng.integers(0, 9, self.longest).tolist())[:length]
        self.names += 1
        self.requests.append(Request(self.names, prompt, bool(rng.random() < 0.15), int(rng.integers(1, 24))))

    def schedule(self, r: Request) -> None:
        rng, window, size = self.rng, self.policy.window, self.block_size
        hashes = hashes_of(r.tokens)
        if not r.running:
            r.running, r.prefill, r.life = True, len(r.tokens), r.life + 1
            found = []
            while (end := (len(found) + 1) * size) < r.prefill and hashes[end - 1] in self.cached:
                found.append(self.cached[hashes[end - 1]])
            if rng.random() < 0.5:
                found = found[: rng.integers(0, len(found) + 1)]
            # As the host: a hit no longer than the window saves nothing.
            r.hit = len(found) * size if len(found) * size > window else 0
            r.table = found[: r.hit // size]
            r.replay_start = r.first = max(r.hit - window, 0)
            self.seen["hit"] += r.hit > 0
            self.seen["whole after a hit"] += r.hit > 0 and r.whole
            self.seen["hit of a later life"] += r.hit > 0 and r.life > 1
        r.drafts = []
        if r.first < r.prefill:
            r.rows = int(min(rng.integers(1, 2 * window + 4), r.prefill - r.first))
            self.seen["chunk ends in a replay"] += 0 < r.first + r.rows < r.hit
        else:
            r.drafts = rng.integers(9, 12, rng.integers(0, self.policy.drafts + 1)).tolist()
            r.rows = 1 + len(r.drafts)
        while len(r.table) * size < r.first + r.rows:
            r.table.append(self.blocks)
            self.blocks += 1
        # Drafts are not cached: they may be rejected.
        for b in range(min(r.first + r.rows, max(r.first, r.prefill)) // size):
            self.cached.setdefault(hashes[(b + 1) * size - 1], r.table[b])
        for caches in self.caches.values():
            caches.free(r.name, r.first - window + 1)

    def forward(self, batch: list[Request]) -> None:
        arrays = dict(
            first_position=np.array([r.first for r in batch]), rows=np.array([r.rows for r in batch]),
            prefill=np.array([r.prefill for r in batch]), replay_start=np.array([r.replay_start for r in batch]),
            whole=np.array([r.whole for r in batch]),
        )
        self.seen["several hits in a step"] += sum(r.first < r.hit for r in batch) > 1
        self.seen["decode beside prefill"] += len({r.first < r.prefill for r in batch}) == 2
        visible = {}
        for mode, caches in self.caches.items():
            planned = plan(replace(self.policy, decoder=mode), **arrays)
            visible[mode] = Forward(self, mode, caches, batch, planned).run()
        for row, keys in visible["compact"].items():
            assert keys == visible["mask"][row], row
            self.seen["narrowed"] += keys != visible["off"][row]
        for row in visible["mask"].keys() - visible["compact"].keys():
            assert not visible["mask"][row]["later"], row
            self.seen["dropped"] += 1

    def accept(self, r: Request) -> None:
        """Rejects up to all drafts, and sometimes the step's whole result: drafts + 1 tokens."""
        rng = self.rng
        if r.first < r.prefill:
            r.first += r.rows
            accepted = 0 if r.first == r.prefill else None
            newest = r.first - 1
        else:
            accepted = int(rng.integers(-1, len(r.drafts) + 1))
            self.seen[f"rolled back {len(r.drafts) - accepted}"] += 1
            if accepted < 0:
                return
            newest = r.first + accepted
            r.tokens += r.drafts[:accepted]
            r.first += 1 + accepted
        if accepted is None:
            return
        self.check_draft_context(r, newest)
        r.tokens.append(int(rng.integers(0, 9)))
        r.outputs -= 1 + accepted
        if r.outputs <= 0:
            for caches in self.caches.values():
                caches.free(r.name)

    def check_draft_context(self, r: Request, newest: int) -> None:
        hashes, window = hashes_of(r.tokens), self.policy.window
        for mode, caches in self.caches.items():
            for key in range(max(newest - window + 1, 0), newest + 1):
                assert caches.window["later"].get((r.name, key)) == (r.life, hashes[key]), (mode, r, key)


class Forward:
    """One step of one mode."""

    def __init__(self, simulation: Simulation, mode: str, caches: Caches, batch: list[Request], planned):
        self.window, self.size = simulation.policy.window, simulation.block_size
        self.margin = simulation.policy.drafts + 1
        self.mode, self.caches, self.batch, self.planned, self.written = mode, caches, batch, planned, set()

    def run(self) -> dict:
        """{(request, position): {kind: visible keys}} of the rows that run all layers."""
        texts = [hashes_of((r.tokens + r.drafts)[: r.first + r.rows]) for r in self.batch]
        for i, (r, text) in enumerate(zip(self.batch, texts, strict=True)):
            assert 0 <= self.planned.dropped[i] <= r.rows
            assert self.mode == "compact" or self.planned.dropped[i] == 0
            for row in range(r.rows):
                self.write(i, r, text, row)
        visible = {}
        for i, (r, text) in enumerate(zip(self.batch, texts, strict=True)):
            for pos in range(r.first, r.first + r.rows):
                self.check_encoder(i, r, text, pos)
                if pos - r.first >= self.planned.dropped[i]:
                    visible[r.name, pos] = self.read(i, r, text, pos)
        return visible

    def put(self, cache: dict, kind: str, key: tuple, value) -> None:
        assert (kind, key) not in self.written, f"{kind} slot {key} is written twice"
        self.written.add((kind, key))
        cache[key] = value

    def write(self, i: int, r: Request, text: list[int], row: int) -> None:
        pos = r.first + row
        for kind, cache in self.caches.window.items():
            if kind != "later" or row >= self.planned.dropped[i]:
                self.put(cache, kind, (r.name, pos), (r.life, text[pos]))
        if pos < self.planned.replay_end[i]:
            return
        assert pos >= r.hit, f"a shared block is written at {pos} of {r}"
        if pos % 2:  # the other half of the group: the state left by this request's own row before
            assert self.caches.window["encoder"][r.name, pos - 1] == (r.life, text[pos - 1])
        self.put(self.caches.compressed, "compressed", (r.table[pos // self.size], pos % self.size), text[pos])

    def keys(self, kind: str, start: int, r: Request, text: list[int], pos: int) -> list[int]:
        found = list(range(max(start, pos - self.window + 1), pos + 1))
        for key in found:
            assert self.caches.window[kind].get((r.name, key)) == (r.life, text[key]), (self.mode, kind, r, pos, key)
        if pos >= r.prefill:
            assert len(found) == min(self.window, pos + 1), (self.mode, kind, r, pos)
        return found

    def check_encoder(self, i: int, r: Request, text: list[int], pos: int) -> None:
        self.keys("encoder", self.planned.window_start[i], r, text, pos)
        for key in range(pos + 1):
            assert self.caches.compressed.get((r.table[key // self.size], key % self.size)) == text[key], (r, pos, key)

    def read(self, i: int, r: Request, text: list[int], pos: int) -> dict:
        cut = self.keys("cut", self.planned.window_start[i], r, text, pos)
        later = self.keys("later", self.planned.decoder_start[i], r, text, pos)
        if r.whole or self.mode == "off" or pos >= r.prefill - self.margin:
            assert later == cut, (self.mode, r, pos)
        return {"cut": cut, "later": later}
