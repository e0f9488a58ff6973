# SPDX-License-Identifier: Apache-2.0
"""The core on paged caches without a host: whatever way a sequence is cut, the reference's logits."""

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.model.model import Model
from tests import pager
from tests.core import load_core, random_ids
from tests.reference import ReferenceModel

# Both sides are float64 and differ in summation order; measured 1e-13 on logits of size 20.
BOUND = 1e-9
# Windows of 8; 4 rows chosen; candidates bite above 8 rows of ratio 1.
LENGTH = 40
DECODED = 5


@pytest.fixture(scope="module")
def folder(run_seed, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("core") / "tiny", preset="tiny", seed=run_seed)


@pytest.fixture(scope="module")
def reference(folder):
    return ReferenceModel(folder)


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return load_core(folder)


def feed(host: pager.Pager, chunks: dict[int, list[int]], logits: dict[int, list]) -> None:
    for request, rows in host.run(chunks).items():
        logits.setdefault(request, []).append(rows)


def check(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    assert got.shape == want.shape, where
    error = (got - want).abs().amax(-1)
    wrong = (error > BOUND).nonzero().flatten().tolist()
    assert not wrong, f"{where}: off at positions {wrong}, by {float(error.max())}"


@pytest.mark.parametrize("block", [2, 8, 16])
def test_every_cut(model, reference, run_rng, block):
    """All 39 ways to cut 40 tokens into two chunks, side by side in one batch, then decoding."""
    ids = random_ids(run_rng, model.cfg, LENGTH + DECODED)
    want = reference.logits(ids)
    cuts = {request: request + 1 for request in range(LENGTH - 1)}
    host, logits = pager.Pager(model, len(cuts), len(ids), block, run_rng.randrange(1 << 30)), {}
    feed(host, {r: ids[:cut] for r, cut in cuts.items()}, logits)
    feed(host, {r: ids[cut:LENGTH] for r, cut in cuts.items()}, logits)
    for at in range(LENGTH, len(ids)):
        feed(host, {r: ids[at : at + 1] for r in cuts}, logits)
    for request, cut in cuts.items():
        check(torch.cat(logits[request]), want, f"cut after {cut}")


def test_prefill_and_token_by_token(model, reference, run_rng):
    ids = random_ids(run_rng, model.cfg, LENGTH)
    want = reference.logits(ids)
    host, logits = pager.Pager(model, 2, LENGTH, 16, run_rng.randrange(1 << 30)), {}
    feed(host, {0: ids}, logits)
    for token in ids:
        feed(host, {1: [token]}, logits)
    check(logits[0][0], want, "prefill")
    check(torch.cat(logits[1]), want, "token by token")


def test_random_chunks_of_random_requests(model, reference, run_rng):
    """Requests join and pause at random; each one's rows lie anywhere in the batch."""
    ids = {r: random_ids(run_rng, model.cfg, run_rng.randrange(1, 120)) for r in range(8)}
    host, logits, done = pager.Pager(model, 8, 120, 8, run_rng.randrange(1 << 30)), {}, dict.fromkeys(ids, 0)
    while waiting := [r for r in ids if done[r] < len(ids[r])]:
        chunks = {}
        for r in run_rng.sample(waiting, run_rng.randrange(1, len(waiting) + 1)):
            chunks[r] = ids[r][done[r] : done[r] + run_rng.choice([1, 1, 2, 3, 5, 7, 8, 17, 33])]
            done[r] += len(chunks[r])
        feed(host, chunks, logits)
    for r in ids:
        check(torch.cat(logits[r]), reference.logits(ids[r]), f"request {r} of {len(ids[r])}")


@pytest.mark.parametrize("rejected", [1, 2, 3, 4, 5, 6])
def test_rejected_rows_are_overwritten(model, reference, run_rng, rejected):
    """Each step verifies its last token and drafts of which the final `rejected` are wrong.

    One request per start of verification, so that wrong rows begin at each offset in pair, window
    and block, also across block edges.  At most 7 rows a step: a token and 6 drafts.
    """
    ids = random_ids(run_rng, model.cfg, LENGTH)
    want = reference.logits(ids)
    starts = dict(enumerate(range(1, 18)))
    host, logits = pager.Pager(model, len(starts), LENGTH + 8, 8, run_rng.randrange(1 << 30)), {r: [] for r in starts}
    done = dict(starts)
    feed(host, {r: ids[:start] for r, start in starts.items()}, logits)
    while waiting := [r for r in starts if done[r] < LENGTH]:
        chunks, right = {}, {}
        for r in waiting:
            right[r] = ids[done[r] : done[r] + run_rng.randrange(1, 8 - rejected)]
            chunks[r] = right[r] + random_ids(run_rng, model.cfg, rejected)
        for r, rows in host.run(chunks, at=done).items():
            logits[r].append(rows[: len(right[r])])
            done[r] += len(right[r])
    for r, start in starts.items():
        check(torch.cat(logits[r]), want, f"verified from {start}")


def test_context_may_be_an_upper_bound(model, reference, run_rng):
    """A host that does not know yet how many drafts were accepted gives lengths that are too long."""
    ids = random_ids(run_rng, model.cfg, LENGTH)
    host, logits = pager.Pager(model, 1, LENGTH, 8, run_rng.randrange(1 << 30)), {}
    host.slack = 7
    for chunk in (ids[:13], ids[13:14], ids[14:]):
        feed(host, {0: chunk}, logits)
    check(torch.cat(logits[0]), reference.logits(ids), "padded lengths")


def test_ragged_batches_drain(model, reference, run_rng):
    """Requests whose row counts only the device knows, beside prefills, while 64 requests become 1.

    A step verifies 1 to 7 rows of each; the host knows their sum and spreads it evenly.
    """
    lengths = [run_rng.randrange(9, 30) for _ in range(63)] + [60]  # the last to start is the last to end
    ids = [random_ids(run_rng, model.cfg, length) for length in lengths]
    want = [reference.logits(i) for i in ids]
    host, done, logits = pager.Pager(model, 64, 64, 8, run_rng.randrange(1 << 30)), {}, {}
    host.slack = 7
    sizes = set()
    while waiting := [r for r in range(64) if done.get(r, 0) < lengths[r]]:
        decoding = [r for r in waiting if r in done]
        fresh = [r for r in waiting if r not in done][: run_rng.randrange(3) if decoding else 56]
        run_rng.shuffle(decoding)
        # The longest takes single rows while it has company: the others need 28 steps at most, and it has rows left.
        most = {63: 1} if len(waiting) > 1 else {}
        chunks = {r: ids[r][done[r] : done[r] + run_rng.randint(1, most.get(r, 7))] for r in decoding}
        chunks |= {r: ids[r][: run_rng.randrange(1, min(lengths[r], 9))] for r in fresh}
        for r, rows in host.run(chunks, ragged=len(decoding)).items():
            logits.setdefault(r, []).append(rows)
            done[r] = done.get(r, 0) + len(chunks[r])
        sizes.add(len(decoding))
    assert 1 in sizes and max(sizes) > 50
    for r in range(64):
        check(torch.cat(logits[r]), want[r], f"request {r} of {lengths[r]}")
