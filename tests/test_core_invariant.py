# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant mode: a request's logits have the same bits alone and in company, a row or many at a time."""

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from tests.core import load_core, load_core_draft, random_ids
from tests.pager import Pager

BLOCK = 16
# Windows hold 8 rows, 4 compressed rows are chosen: beyond 8 tokens everything is cut, below 4 nothing.
LENGTHS = [1, 3, 9, 30]
DECODED = 5


@pytest.fixture(scope="module")
def folder(run_seed, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("invariant") / "tiny", preset="tiny", seed=run_seed)


def alone(model, rng, ids: list[int], prompt: int) -> torch.Tensor:
    """Logits [T, V] of one request: its prompt whole, then a row a step."""
    host = Pager(model, 1, len(ids), BLOCK, rng.randrange(1 << 30))
    logits = [host.run({0: ids[:prompt]})[0]]
    return torch.cat(logits + [host.run({0: [token]})[0] for token in ids[prompt:]])


def together(model, rng, requests: dict[int, list[int]], prompts: dict[int, int], ragged: bool = False) -> dict[int, torch.Tensor]:
    """Logits of all requests in shared steps: prompts in random pieces, then 1 to 4 rows a step, of which
    the last may be wrong and are computed again, as after rejected drafts."""
    host, logits = Pager(model, max(requests) + 1, 64, BLOCK, rng.randrange(1 << 30)), {r: [] for r in requests}
    host.slack = rng.randrange(0, 3)
    left = set(requests)
    while left:
        chunks, stands = {}, {}
        for r in rng.sample(sorted(left), rng.randrange(1, len(left) + 1)):
            done = sum(len(rows) for rows in logits[r])
            rest = requests[r][done:]
            take = rng.randrange(1, min(len(rest), prompts[r] - done if done < prompts[r] else 4) + 1)
            wrong = 0 if done < prompts[r] else rng.randrange(0, 5 - take)
            wrong = min(wrong, 64 - done - take)
            chunks[r], stands[r] = rest[:take] + random_ids(rng, model.cfg, wrong), take
        decoding = [r for r in chunks if host.requests[r].tokens and len(host.requests[r].tokens) >= prompts[r]]
        order = decoding + [r for r in chunks if r not in decoding]
        got = host.run({r: chunks[r] for r in order}, ragged=len(decoding) if ragged else 0)
        for r, rows in got.items():
            logits[r].append(rows[: stands[r]])
            host.requests[r].tokens = host.requests[r].tokens[: sum(len(rows) for rows in logits[r])]
            if len(host.requests[r].tokens) == len(requests[r]):
                left.remove(r)
    return {r: torch.cat(rows) for r, rows in logits.items()}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize(("dtype", "cache"), [(torch.bfloat16, "auto"), (torch.float32, "fp8_ds_mla")])
def test_alone_and_together(folder, run_rng, dtype, cache):
    """Prompts in pieces, decodes of 1 to 4 rows, row counts that only the device knows: no bit differs."""
    model = load_core(folder, dtype, cache=cache, batch_invariant=True)
    prompts = dict(enumerate(LENGTHS))
    requests = {r: random_ids(run_rng, model.cfg, length + DECODED) for r, length in prompts.items()}
    want = {r: alone(model, run_rng, ids, prompts[r]) for r, ids in requests.items()}
    for ragged in (False, True):
        for r, logits in together(model, run_rng, requests, prompts, ragged).items():
            assert torch.equal(bits(logits), bits(want[r])), f"prompt of {prompts[r]}"


def last_logits(model, rng, requests: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    """Logits [1, V] behind each request's last token: all prompts in one step, then all last tokens."""
    host = Pager(model, max(requests) + 1, 32, BLOCK, rng.randrange(1 << 30))
    host.run({r: ids[:-1] for r, ids in requests.items()})
    return host.run({r: ids[-1:] for r, ids in requests.items()})


@pytest.mark.parametrize(("dtype", "invariant"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)])
def test_sizes(folder, run_rng, dtype, invariant):
    """1 to 64 requests a step.  Without the mode some bits do differ, or the tests here would prove nothing."""
    model, differs = load_core(folder, dtype, batch_invariant=invariant), False
    requests = {r: random_ids(run_rng, model.cfg, run_rng.choice([2, 4, 10])) for r in range(64)}
    full = last_logits(model, run_rng, requests)
    for size in (1, 2, 7):
        some = dict(run_rng.sample(sorted(requests.items()), size))
        differs |= any(not torch.equal(bits(x), bits(full[r])) for r, x in last_logits(model, run_rng, some).items())
    assert differs is not invariant


def test_drafts(folder, run_rng):
    """The draft model's blocks too have the bits of a batch of one."""
    model, draft = (load(folder, torch.bfloat16, batch_invariant=True) for load in (load_core, load_core_draft))
    requests = {r: random_ids(run_rng, model.cfg, length) for r, length in enumerate(LENGTHS)}

    def propose(some: dict[int, list[int]]) -> dict[int, tuple[torch.Tensor, ...]]:
        host = Pager(model, max(some) + 1, 64, BLOCK, run_rng.randrange(1 << 30), draft)
        host.run(some)
        blocks = host.propose({r: ids[0] for r, ids in some.items()}, 3)
        embedded = {r: draft.markov_embed(torch.tensor(ids[:1] * 3)) for r, ids in some.items()}
        return {r: (*blocks[r], draft.markov_shift(embedded[r]), draft.confidence(blocks[r][1], embedded[r])) for r in some}

    every = propose(requests)
    for r in requests:
        for one, same in zip(propose({r: requests[r]})[r], every[r], strict=True):
            assert torch.equal(bits(one), bits(same)), f"prompt of {LENGTHS[r]}"
