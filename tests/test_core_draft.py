# SPDX-License-Identifier: Apache-2.0
"""The draft on paged caches without a host: whatever way its context came about, the reference's block."""

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from tests.core import load_core, load_core_draft, random_ids
from tests.pager import Pager
from tests.reference import ReferenceDraft, ReferenceModel

BOUND = 1e-9  # float64 on both sides, as in test_core_paging


@pytest.fixture(scope="module")
def folder(run_seed, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("draft") / "tiny", preset="tiny", seed=run_seed)


@pytest.fixture(scope="module")
def reference(folder):
    return ReferenceDraft(ReferenceModel(folder))


@pytest.fixture(scope="module")
def models(folder):
    return load_core(folder), load_core_draft(folder)


def check(models, reference, host: Pager, anchors: dict[int, int], k: int) -> None:
    """Blocks of all requests at once against the reference's, the heads along its tokens too."""
    draft = models[1]
    for r, (base, hidden) in host.propose(anchors, k).items():
        tokens, where = host.requests[r].tokens, f"request {r}, {len(host.requests[r].tokens)} tokens"
        want = reference.propose(tokens, anchors[r], k=k)
        assert float((base - want.base_logits).abs().max()) < BOUND, where
        embedded = draft.markov_embed(torch.tensor([anchors[r], *want.tokens[:-1]]))
        assert float((base + draft.markov_shift(embedded) - want.logits).abs().max()) < BOUND, where
        confidence = torch.sigmoid(draft.confidence(hidden, embedded))
        assert float((confidence - want.confidence).abs().max()) < BOUND, where


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_context_length(models, reference, run_rng, k):
    """1 to 24 tokens of context (windows of 8), prefilled whole or in random chunks, in one batch."""
    lengths = list(range(1, 25))
    host = Pager(models[0], len(lengths), 32, 8, run_rng.randrange(1 << 30), models[1])
    ids = {r: random_ids(run_rng, models[0].cfg, length) for r, length in enumerate(lengths)}
    left = dict(ids)
    while left:
        take = {r: run_rng.choice([len(rest), run_rng.randrange(1, len(rest) + 1)]) for r, rest in left.items()}
        host.run({r: rest[: take[r]] for r, rest in left.items()})
        left = {r: rest[take[r] :] for r, rest in left.items() if rest[take[r] :]}
    check(models, reference, host, {r: random_ids(run_rng, models[0].cfg, 1)[0] for r in ids}, k)


def test_rejected_rows_leave_nothing(models, reference, run_rng):
    """Steps that verify an anchor and drafts of which a random prefix stands; then the next block is right."""
    host = Pager(models[0], 12, 64, 8, run_rng.randrange(1 << 30), models[1])
    ids = {r: random_ids(run_rng, models[0].cfg, 64) for r in range(12)}
    done = {r: run_rng.randrange(1, 20) for r in ids}
    host.run({r: ids[r][: done[r]] for r in ids})
    for _ in range(6):
        check(models, reference, host, {r: ids[r][done[r]] for r in ids}, 3)
        right = {r: run_rng.randrange(0, 4) for r in ids}
        host.run({r: ids[r][done[r] : done[r] + 1 + right[r]] + random_ids(run_rng, models[0].cfg, 3 - right[r]) for r in ids}, at=done)
        for r in ids:
            done[r] += 1 + right[r]
            host.requests[r].tokens = host.requests[r].tokens[: done[r]]
