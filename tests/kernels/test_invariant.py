# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant ops: a row has the same bits alone, in any company and at any place."""

import pytest
import torch

from deepseek_v41_plugin.kernels import attention, engram, indexer, invariant, linear, mhc, moe
from deepseek_v41_plugin.kernels.formats.records import cache_format
from deepseek_v41_plugin.kernels.latent.reference import _gated_mean
from deepseek_v41_plugin.kernels.norm import mean_square
from deepseek_v41_plugin.kernels.rope import rope

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
WIDTH, EXPERTS, INNER, COPIES = 96, 6, 64, 4


@pytest.fixture(autouse=True)
def switch(run_rng):
    torch.manual_seed(run_rng.randrange(1 << 30))
    with invariant.switched(True):
        yield


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def check(rng, op, *rows: torch.Tensor) -> None:
    """op(*rows) of 40 rows against op of 12 choices of them, in any order and number."""
    def outs(*rows):
        got = op(*rows)
        return got if isinstance(got, tuple) else (got,)

    every = outs(*rows)
    for size in (1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33):
        some = torch.tensor(rng.sample(range(len(rows[0])), size))
        for got, want in zip(outs(*(x[some] for x in rows)), every, strict=True):
            assert torch.equal(bits(got), bits(want[some])), f"{size} rows"


def rand(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def scales(*shape: int) -> torch.Tensor:
    return torch.randint(120, 130, shape, dtype=torch.uint8)


@DTYPES
@pytest.mark.parametrize("width", [32, 96, 2048])
def test_products(run_rng, dtype, width):
    x = rand(40, width, dtype=dtype)
    for out in (1, 7, 24, 300):
        weight = rand(out, width, dtype=dtype)
        check(run_rng, lambda x: invariant.linear(x, weight), x)
        fp8 = weight.to(torch.float8_e4m3fn), scales(-(-out // 32), width // 32)
        check(run_rng, lambda x: linear.fp8_linear(x, *fp8), x)
    odd, narrow = rand(40, width + 1, dtype=dtype), rand(7, width + 1, dtype=dtype)
    check(run_rng, lambda x: invariant.linear(x, narrow), odd)


@DTYPES
def test_mhc(run_rng, dtype):
    stream, mixes = rand(40, COPIES, WIDTH, dtype=dtype), 2 * COPIES + COPIES**2
    fn, base, scale = rand(mixes, COPIES * WIDTH) / 10, rand(mixes), rand(3)
    check(run_rng, lambda x: mhc.mixes(x, fn, base, scale, 20, 1e-6, 1e-6), stream)
    pre, post, comb = mhc.mixes(stream, fn, base, scale, 20, 1e-6, 1e-6)
    check(run_rng, mhc.collapse, stream, pre)
    check(run_rng, mhc.expand, stream, rand(40, WIDTH, dtype=dtype), post, comb)


@DTYPES
def test_moe(run_rng, dtype):
    x = rand(40, WIDTH, dtype=dtype)
    weight, bias = rand(EXPERTS, WIDTH), rand(EXPERTS)
    check(run_rng, lambda x: moe.route(x, weight, bias, 3, 1.5), x)
    packed = codes(EXPERTS, 2 * INNER, WIDTH // 2), scales(EXPERTS, 2 * INNER, WIDTH // 32), codes(EXPERTS, WIDTH, INNER // 2), scales(EXPERTS, WIDTH, INNER // 32)
    check(run_rng, lambda x, ids, weights: moe.experts(x, ids, weights, *packed, 7.0), x, *moe.route(x, weight, bias, 3, 1.5))
    check(run_rng, lambda gate, up: moe.swiglu(gate, up, 7.0), rand(40, 33), rand(40, 33))


@DTYPES
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_attention(run_rng, dtype, cache):
    dim, heads = 64, 3
    records = cache_format(cache, dim, 32, 32)
    window = records.window.encode(rand(9, 8, dim))
    compressed = records.compressed.encode(rand(9, 8, dim))
    q, sink = rand(40, heads, dim, dtype=dtype), rand(heads)
    slots = [torch.where(torch.rand(40, width) < 0.3, -1, torch.randint(8, 72, (40, width))) for width in (8, 5)]
    for ratio in (0, 1):
        def attend(q, w, c):
            return attention.sparse_attention(q, sink, dim**-0.5, window, w, records.window, *((compressed, c, records.compressed) if ratio else (None,) * 3))

        check(run_rng, attend, q, *slots)


@DTYPES
def test_index_scores(run_rng, dtype):
    """Also whatever the longest context beside a row, and whether its keys are shared or its own."""
    q, weights, keys = rand(40, 3, 32, dtype=dtype).float(), rand(40, 3), rand(300, 32)
    visible = torch.tensor([run_rng.randrange(0, 130) for _ in range(40)])
    check(run_rng, lambda q, w, v: indexer.scores(q, w, keys, v), q, weights, visible)
    full = indexer.scores(q, weights, keys, visible)
    own = indexer.scores(q, weights, keys.expand(40, -1, -1).clone(), visible)
    assert torch.equal(bits(full), bits(own))
    for n in (130, 128, 129, 257):
        part, most = indexer.scores(q, weights, keys[:n], visible), visible.clamp(max=n)
        shorter = most == visible
        assert torch.equal(bits(part[shorter]), bits(full[shorter, :n])), n
    assert indexer.scores(q, weights, keys[:0], visible * 0).shape == (40, 0)


@DTYPES
def test_small_ops(run_rng, dtype):
    stream = rand(40, COPIES, WIDTH, dtype=dtype)
    q, k = rand(COPIES, WIDTH), rand(COPIES, WIDTH)
    check(run_rng, lambda s, key, value: engram.engram_gate(s, key, value, q, k, 1e-6), stream, rand(40, COPIES, WIDTH, dtype=dtype), rand(40, WIDTH, dtype=dtype))
    check(run_rng, lambda x: invariant.over_rows(mean_square, x), rand(40, 80))
    check(run_rng, _gated_mean, rand(40, 64), rand(40, 64))
    freq = torch.rand(8, dtype=torch.float64)
    check(run_rng, lambda x, positions: rope(x, positions, freq), rand(40, 3, 32, dtype=dtype), torch.randint(0, 1 << 20, (40,)))


def test_off_is_one_call(run_rng):
    """Off, and inside the switch again on: how many rows a function is given at a time."""
    seen = []

    def count(x):
        seen.append(len(x))
        return x + 1, x

    x = rand(40, 3)
    for on, options, want in (
        (False, {}, [40]), (False, {"most": 32}, [32, 8]), (True, {"most": 5}, [16] * 3), (True, {"apart": True}, [1] * 40),
    ):
        seen.clear()
        with invariant.switched(on):
            got = invariant.over_rows(count, x, **options)
        assert seen == want and torch.equal(got[0], x + 1) and torch.equal(got[1], x)
    assert invariant.enabled()
    assert invariant.linear(x[:0], x).shape == (0, 40)
