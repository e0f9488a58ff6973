# SPDX-License-Identifier: Apache-2.0
"""The trimmed batch: every row and logit found again, padding, and no value read back to the host."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from deepseek_v41_plugin.kernels import verification as op


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def ragged(rng, requests, k):
    """(confidence, drafts, base): decode rows, prefill chunks, padding requests without rows."""
    base = np.where(rng.random(requests) < 0.2, rng.integers(2, 40, requests), 1)
    base[rng.random(requests) < 0.05] = 0
    drafts = rng.integers(0, k + 1, requests) * (base > 0)
    confidence = torch.tensor(rng.beta(0.9, 0.4, (requests, k)), dtype=torch.float32)
    return confidence, torch.tensor(drafts, dtype=torch.int32), torch.tensor(base, dtype=torch.int32)


def test_every_row_and_logit_is_where_a_loop_puts_it(rng):
    for _ in range(40):
        requests, k = int(rng.integers(1, 301)), int(rng.integers(1, 9))
        confidence, drafts, base = ragged(rng, requests, k)
        total = int(drafts.sum())
        budget = int(rng.integers(0, total + 1))
        rows = int(base.sum()) + budget + int(rng.integers(0, 9))
        logits = requests + budget + int(rng.integers(0, 9))
        got = op.trim(confidence, drafts, base, torch.tensor(budget), rows, logits)
        assert torch.equal(got.lengths, op.lengths(confidence, drafts, budget))

        source, request, start, logit_rows, logit_start, first = [], [], [0], [], [0], 0
        for r, (b, d, n) in enumerate(zip(base.tolist(), drafts.tolist(), got.lengths.tolist(), strict=True)):
            source += range(first, first + b + n)
            request += [r] * (b + n)
            first += b + d
            start.append(len(source))
            if b:
                logit_rows += range(len(source) - n - 1, len(source))
            logit_start.append(len(logit_rows))
        assert got.source.tolist() == source + [-1] * (rows - len(source))
        assert got.request.tolist() == request + [requests] * (rows - len(request))
        assert got.start.tolist() == start and got.logit_start.tolist() == logit_start
        assert got.logit_rows.tolist() == logit_rows + [-1] * (logits - len(logit_rows))
        assert got.lengths.dtype == got.start.dtype == got.logit_start.dtype == torch.int32


def test_round_trip(rng):
    """Rows gathered and put back leave the full batch with holes at the dropped drafts only."""
    for _ in range(20):
        requests, k = int(rng.integers(1, 100)), int(rng.integers(1, 9))
        confidence, drafts, base = ragged(rng, requests, k)
        full_rows = int((base + drafts).sum())
        budget = int(rng.integers(0, int(drafts.sum()) + 1))
        rows = full_rows + 5
        got = op.trim(confidence, drafts, base, budget, rows, rows)
        x = torch.tensor(rng.standard_normal(full_rows))
        kept = got.source >= 0
        back = torch.full_like(x, float("nan"))
        back[got.source[kept]] = x[got.source[kept]]
        owner = torch.repeat_interleave(torch.arange(requests), base + drafts)
        offset = torch.cat([torch.arange(int(n)) for n in base + drafts])
        dropped = offset >= (base + got.lengths)[owner]
        assert torch.equal(back.isnan(), dropped) and torch.equal(back[~dropped], x[~dropped])
        assert bool((got.source[kept].diff() > 0).all())


def test_all_drafts_is_the_full_batch(rng):
    confidence, drafts, base = ragged(rng, 64, 5)
    rows = int((base + drafts).sum())
    got = op.trim(confidence, drafts, base, 64 * 5, rows, rows)
    assert got.source.tolist() == list(range(rows))


def test_no_requests():
    none = torch.zeros(0, dtype=torch.int32)
    got = op.trim(torch.zeros(0, 5), none, none, 3, 4, 2)
    assert got.start.tolist() == [0] and got.logit_start.tolist() == [0]
    assert got.source.tolist() == [-1] * 4 and got.request.tolist() == [0] * 4 and got.logit_rows.tolist() == [-1] * 2


def test_nothing_is_read_back_to_the_host():
    """Fake tensors hold no values: reading one (`item`, `nonzero`, a shape from data) raises."""
    with FakeTensorMode():
        drafts = torch.empty(48, dtype=torch.int32)
        got = op.trim(torch.empty(48, 5), drafts, torch.empty_like(drafts), torch.empty((), dtype=torch.int64), 200, 150)
        assert [tuple(t.shape) for t in got] == [(48,), (49,), (200,), (200,), (49,), (150,)]
        with pytest.raises(DataDependentOutputException):
            drafts.sum().item()
