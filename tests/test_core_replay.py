# SPDX-License-Identifier: Apache-2.0
"""Bounded replay on paged caches without a host, against the reference's."""

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.replay import Policy
from tests.core import load_core, load_core_draft, random_ids
from tests.pager import Pager
from tests.reference import ReferenceDraft, ReferenceModel, Replay

BOUND = 1e-9  # float64 on both sides, as in test_core_paging
WINDOW, KEEP, BLOCK, LENGTH = 8, 12, 8, 80


@pytest.fixture(scope="module")
def folder(run_seed, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("replay") / "tiny", preset="tiny", seed=run_seed)


@pytest.fixture(scope="module")
def reference(folder):
    return ReferenceModel(folder)


@pytest.fixture(scope="module")
def models(folder):
    return load_core(folder), load_core_draft(folder)


def feed(host: Pager, ids: dict[int, list[int]], rng, start: dict[int, int]) -> dict[int, torch.Tensor]:
    """Each request's ids from `start` on, whole or in random chunks: logits of those rows."""
    logits, done = {r: [] for r in ids}, dict(start)
    while waiting := [r for r in ids if done[r] < len(ids[r])]:
        chunks = {}
        for r in waiting:
            left = len(ids[r]) - done[r]
            chunks[r] = ids[r][done[r] : done[r] + rng.choice([left, rng.randrange(1, left + 1)])]
        for r, rows in host.run(chunks, at=done).items():
            logits[r].append(rows)
            done[r] += len(chunks[r])
    return {r: torch.cat(rows) for r, rows in logits.items()}


def close(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    error = (got - want).abs().amax(-1)
    assert float(error.max()) < BOUND, f"{where}: off at rows {(error > BOUND).nonzero().flatten().tolist()}"


def hit(host: Pager, r: int, source: int, length: int) -> None:
    """Request r shares the first `length` tokens' compressed rows and index keys with `source`."""
    host.table[r, : length // BLOCK] = host.table[source, : length // BLOCK]


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_hits(models, reference, run_rng, mode):
    """Hits at every block of one prompt, all in one batch, then hits on top of those; each decodes on.

    Windows are new in every request, compressed rows before the hit are the first request's: nothing of
    them may change.
    """
    hits = [BLOCK * n for n in range(2, 9)]
    host = Pager(models[0], 1 + 2 * len(hits), LENGTH, BLOCK, run_rng.randrange(1 << 30), models[1])
    host.policy = Policy(WINDOW, mode, KEEP, drafts=3)
    first = random_ids(run_rng, models[0].cfg, 70)
    host.requests[0].prefill = 70
    host.run({0: first})
    ids, runs = {0: first}, {0: reference.run(first)}
    for generation in (0, 1):
        before = [cache.clone() for caches in host.caches.values() for kind, cache in caches.items() if kind in ("compressed", "index")]
        asked = {}
        for n, length in enumerate(hits):
            r, source = 1 + generation * len(hits) + n, generation * (1 + n)
            length = length if generation == 0 else (len(ids[source]) - 1) // BLOCK * BLOCK
            hit(host, r, source, length)
            ids[r] = ids[source][:length] + random_ids(run_rng, models[0].cfg, run_rng.randrange(1, 8))
            prefill = run_rng.randrange(length + 1, len(ids[r]) + 1)
            request = host.requests[r]
            request.tokens, request.prefill, request.replay_start = ids[r][: length - WINDOW], prefill, length - WINDOW
            asked[r] = length, prefill, source
        got = feed(host, {r: ids[r] for r in asked}, run_rng, {r: length - WINDOW for r, (length, _, _) in asked.items()})
        for r, (length, prefill, source) in asked.items():
            start = 0 if mode == "off" else max(prefill - KEEP, 0)
            replay = Replay(length - WINDOW, length, runs[source].published)
            runs[r] = reference.run(ids[r], replay=replay, decoder_start=start)
            rows = slice(max(start, length) - replay.start, None)
            close(got[r][rows], reference.logits(ids[r], replay=replay, decoder_start=start)[rows], f"hit of {length} in {len(ids[r])}")
        shared = {int(b) for r, (length, _, _) in asked.items() for b in host.table[r, : length // BLOCK]}
        after = [cache for caches in host.caches.values() for kind, cache in caches.items() if kind in ("compressed", "index")]
        for old, new in zip(before, after, strict=True):
            assert all(torch.equal(old[b], new[b]) for b in shared)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_decoder_keeps_the_prompts_end(models, reference, run_rng, mode):
    """Prompts of 1 to 40 tokens in any chunks, and decoding: rows from 12 before the prompt's end are the
    reference's, and so are the drafts behind them."""
    prompts = [1, 2, 7, 8, 11, 12, 13, 14, 19, 20, 21, 29, 33, 40]
    host = Pager(models[0], len(prompts), 64, BLOCK, run_rng.randrange(1 << 30), models[1])
    host.policy = Policy(WINDOW, mode, KEEP, drafts=3)
    ids = {r: random_ids(run_rng, models[0].cfg, length + 6) for r, length in enumerate(prompts)}
    for r, length in enumerate(prompts):
        host.requests[r].prefill = length
    got = feed(host, {r: ids[r][:length] for r, length in enumerate(prompts)}, run_rng, dict.fromkeys(ids, 0))
    draft = ReferenceDraft(reference)
    blocks = host.propose({r: ids[r][length] for r, length in enumerate(prompts)}, 3)
    rest = [host.run({r: ids[r][length + a : length + b] for r, length in enumerate(prompts)}) for a, b in ((0, 1), (1, 5), (5, 6))]
    for r, length in enumerate(prompts):
        start = max(length - KEEP, 0)
        run = reference.run(ids[r][:length], decoder_start=start)
        want = reference.logits(ids[r], decoder_start=start)[start:]
        close(torch.cat((got[r][start:], *(part[r] for part in rest))), want, f"prompt of {length}")
        proposal = draft.propose(ids[r][:length], ids[r][length], features=run.features, window_start=start, k=3)
        close(blocks[r][0], proposal.base_logits, f"draft behind a prompt of {length}")


def test_dropped_rows_stop(models, run_rng):
    """compact really leaves rows out: zero hidden states, so logits 0, and fewer rows in the layers after."""
    host = Pager(models[0], 2, 64, BLOCK, run_rng.randrange(1 << 30))
    host.policy = Policy(WINDOW, "compact", KEEP)
    host.requests[0].prefill, host.requests[1].prefill, host.requests[1].whole = 40, 40, True
    rows = []
    hooks = [layer.ffn.register_forward_hook(lambda _, x, __: rows.append(x[0].x.shape[0])) for layer in models[0].layers]
    got = host.run({0: random_ids(run_rng, models[0].cfg, 30), 1: random_ids(run_rng, models[0].cfg, 5)})
    for hook in hooks:
        hook.remove()
    cut = models[0].cfg.last_kv_source
    assert rows == [35] * cut + [7] * (len(rows) - cut)
    assert not got[0][:28].any() and got[0][28:].any(1).all() and got[1].any(1).all()


def test_nothing_left_behind_the_cut(models, reference, run_rng):
    """A chunk wholly before the kept tokens leaves no row at all after the cut, alone in its batch."""
    ids = random_ids(run_rng, models[0].cfg, 40)
    host = Pager(models[0], 1, 64, BLOCK, run_rng.randrange(1 << 30), models[1])
    host.policy, host.requests[0].prefill = Policy(WINDOW, "compact", KEEP), 40
    host.run({0: ids[:9]})
    got = host.run({0: ids[9:]})[0]
    close(got[28 - 9 :], reference.logits(ids, decoder_start=28)[28:], "after an empty chunk")
