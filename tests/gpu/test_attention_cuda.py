# SPDX-License-Identifier: Apache-2.0
"""Triton's attention, compiled: the float64 reference within bf16, every code of every record, no waiting, CUDA graphs."""

import pytest
import torch
import triton
import triton.language as tl

from deepseek_v41_plugin.kernels import attention, invariant
from deepseek_v41_plugin.kernels.attention import reference, triton_attend
from deepseek_v41_plugin.kernels.attention.triton_records import (
    BIAS, decode_e2m1, decode_e4m3, decode_e4m3_bf16, e4m3_pair, e8m0_pair, natural,
)
from deepseek_v41_plugin.kernels.formats.records import Fp8RopeRecord, GlobalRecord, WindowRecord
from tests.kernels.test_attention import POISON, answer, arguments, check_close, expected, random_case, random_cases

CUDA = torch.device("cuda")


@pytest.fixture
def poisoned(monkeypatch):
    """New tensors are full of poison, so that what no kernel writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(POISON))


def target(rng, **sizes) -> dict:
    return random_case(rng, **{"dim": 512, "turned": 64, "heads": 64, "count": 128, "k": 512, "longest": 900, "states": 64} | sizes)


def test_cuda_takes_triton():
    assert attention.attend.choose(CUDA).name == "triton"


def test_triton_is_near(run_rng, poisoned):
    for name, case in random_cases(run_rng).items():
        check_close(name, answer(case, "cuda"), expected(case), case)


@pytest.mark.parametrize("name", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("splits", [0, 1, 2, 3, 5])
def test_sizes_of_the_target(run_rng, poisoned, name, heads, splits):
    for sizes in ({}, {"full": True}, {"count": 133, "compressed": False}, {"padding": 3}):
        case = target(run_rng, name=name, heads=heads, rows=7, config={"splits": splits}, **sizes)
        check_close(f"{sizes}", answer(case, "cuda"), expected(case), case)


def test_many_rows(run_rng, poisoned):
    """More programs than a GPU holds at once, and offsets beyond 2^31 values of q."""
    case = target(run_rng, rows=64)
    for name in ("q", "positions", "low", "high", "req", "chosen"):
        case[name] = case[name].repeat(1025, *[1] * (case[name].dim() - 1))
    got = answer(case, "cuda")
    check_close("first", got[:64], expected(case | {"rows": 64}), case)
    assert bool((got.view(1025, 64, 64, 512) == got[:64]).all())


@triton.jit
def _decoded(x, pair, tail, out, KIND: tl.constexpr, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr):
    n = tl.arange(0, N)[:, None]
    scale = tl.load(pair + n * (D // GROUP) + tl.arange(0, D // GROUP)[None, :])
    if KIND == 1:
        y = decode_e2m1(tl.load(x + n * (D // 8) + tl.arange(0, D // 8)[None, :]), e4m3_pair(scale), N, D, GROUP)
    else:
        words = tl.load(x + n * (D // 4) + tl.arange(0, D // 4)[None, :])
        if KIND == 0:
            y = decode_e4m3(words, e8m0_pair(scale), N, D, GROUP)
        else:
            y = decode_e4m3_bf16(words, e8m0_pair(scale), tl.load(tail + n * (TAIL // 2) + tl.arange(0, TAIL // 2)[None, :]), N, D, TAIL, GROUP)
    tl.store(out + n * D + tl.arange(0, D)[None, :], natural(y, N, D).to(tl.float32) * BIAS)


def test_every_code_is_exact():
    """All bytes under all scales that records hold: the assembly against the formats' own decoding."""
    byte = torch.arange(256, dtype=torch.uint8)
    finite = torch.where(byte & 0x7F == 0x7F, 0, byte)

    scale = torch.arange(127 - 23, 143, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    raw = torch.cat((finite.expand(len(scale), -1), scale), 1)
    got = decoded(0, finite.expand(len(scale), -1), scale, None, 32)
    assert torch.equal(got, WindowRecord(256).decode(raw, torch.float32))

    scale = torch.arange(1, 127, dtype=torch.uint8)[:, None].expand(-1, 32).contiguous()
    raw = torch.cat((byte.expand(len(scale), -1), scale), 1)
    got = decoded(1, byte.expand(len(scale), -1), scale, None, 16)
    assert torch.equal(got, GlobalRecord(512).decode(raw, torch.float32))

    record = Fp8RopeRecord(512, 64)
    x = torch.randn(64, 512) * torch.logspace(-3, 3, 64)[:, None]
    raw = record.encode(x)
    got = decoded(2, raw[:, :512].contiguous(), raw[:, 576:584].contiguous(), raw[:, 448:576].contiguous(), 64)
    assert torch.equal(got, record.decode(raw, torch.float32))


def decoded(kind: int, values: torch.Tensor, scale: torch.Tensor, tail: torch.Tensor | None, group: int) -> torch.Tensor:
    rows, dim = len(values), values.shape[1] * (2 if kind == 1 else 1)
    full = triton.next_power_of_2(rows)

    def words(x):
        return None if x is None else torch.nn.functional.pad(x, (0, 0, 0, full - rows)).contiguous().view(torch.int32).cuda()

    out = torch.full((full, dim), float("nan"), device="cuda")
    pair = torch.nn.functional.pad(scale, (0, 0, 0, full - rows)).contiguous().cuda()
    _decoded[(1,)](words(values), pair, words(tail), out, KIND=kind, N=full, D=dim, GROUP=group, TAIL=64)
    return out[:rows].cpu()


def test_rows_are_their_own_in_the_invariant_mode(run_rng):
    case = target(run_rng, rows=40, padding=2)
    args = arguments(case, "cuda")
    with invariant.switched(True):
        together = triton_attend.attend(*args)
        for t in (0, 1, 17, 39):
            one = [a[t : t + 1] if isinstance(a, torch.Tensor) and i in (0, 1, 6, 7, 11, 13) else a for i, a in enumerate(args)]
            assert torch.equal(triton_attend.attend(*one), together[t : t + 1])


@pytest.mark.parametrize("splits", [1, 4])
def test_runs_repeat_bit_for_bit(run_rng, splits):
    """A race would show as a difference sooner or later."""
    case = target(run_rng, rows=200, config={"splits": splits})
    args, config = arguments(case, "cuda"), triton_attend.Config(splits=splits)
    first = triton_attend.attend(*args, config=config)
    assert all(torch.equal(first, triton_attend.attend(*args, config=config)) for _ in range(50))


def test_no_sync(run_rng):
    calls = [arguments(target(run_rng, rows=rows), "cuda") for rows in (64, 1, 7, 64)]
    for args in calls:
        triton_attend.attend(*args)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for args in calls:
            triton_attend.attend(*args)
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_graph_follows_its_inputs(run_rng):
    """One graph; rows, their choice and padding are written in place between replays."""
    case = target(run_rng, rows=24)
    args = arguments(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        triton_attend.attend(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_attend.attend(*args)
    for padding in (0, 5, 24):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(run_rng.randrange(1 << 30)))
        now = case | {name: case[name][order].clone() for name in ("q", "positions", "low", "high", "req", "chosen")}
        if padding:
            now["req"][-padding:], now["low"][-padding:], now["high"][-padding:], now["chosen"][-padding:] = 1 << 20, 0, -1, -1
        for mine, new in zip(args, arguments(now, "cuda"), strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(new)
        graph.replay()
        check_close(f"{padding} padding rows", out, reference.attend(*arguments(now, dtype=torch.float64)), now)
