# SPDX-License-Identifier: Apache-2.0
"""Latents of Triton, compiled: the plain form's bytes, rings without races, no waiting, in a CUDA graph."""

import pytest
import torch

from deepseek_v41_plugin.kernels import latent
from deepseek_v41_plugin.kernels.formats.records import Fp8RopeRecord
from deepseek_v41_plugin.kernels.latent import triton_codes
from tests.kernels.test_latent import EPS, RECORDS, answer, cache_of, check_pairs, check_records, new_cache, pair_answer, pair_case, random_cases, record_case

import triton  # isort: skip
import triton.language as tl  # isort: skip

CUDA = torch.device("cuda")


@pytest.fixture
def poison(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))


def test_cuda_takes_triton():
    assert all(op.choose(CUDA).name == "triton" for op in (latent.write_record, latent.pair_latents))


def test_triton_writes_the_plain_forms(run_rng, poison):
    for _ in range(3):
        records, pairs = random_cases(run_rng)
        for name, case in records.items():
            check_records(name, case, answer(case, "cuda"))
        for case in pairs:
            check_pairs(case, pair_answer(case, "cuda"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_many_rows(run_rng, record):
    case = record_case(run_rng, record, 40_000, run_rng.choice((1, 2)), True)
    check_records(record.name, case, answer(case, "cuda"))


def test_a_row_has_the_same_bits_in_any_company(run_rng):
    for record in RECORDS:
        case = record_case(run_rng, record, 300, 1, True)
        normed, whole = answer(case, "cuda")
        for row in run_rng.sample(range(300), 5):
            alone = case | {name: case[name][row : row + 1] for name in ("x", "positions", "slots")}
            got, _ = answer(alone, "cuda")
            assert torch.equal(got[0], normed[row])


def test_programs_of_long_chunks_do_not_race(run_rng):
    """Chunks longer than the ring: the entry that the first row reads is also written in this launch."""
    for _ in range(30):
        case = pair_case(run_rng, 200, 40, 512, padding=7)
        check_pairs(case, pair_answer(case, "cuda"))


def test_blocks_beyond_two_gibibytes(run_rng):
    record = Fp8RopeRecord(512, 64)
    case = record_case(run_rng, record, 4, 1, True) | {"slots": torch.arange(4) + 64 * 60_000, "block_size": 64}
    whole = torch.zeros(60_001, 64, record.width, dtype=torch.uint8, device="cuda")
    given = [case[name].cuda() for name in ("x", "weight", "positions", "freq", "slots")]
    got = latent.write_record(given[0], given[1], EPS, *given[2:], whole, record, 1, 64)
    assert bool((whole[:60_000] == 0).all())
    want = new_cache(case | {"shape": (2, 64, record.width), "gap": 0})
    at = cache_of(case | {"shape": (2, 64, record.width), "gap": 0}, want)
    latent.write_record(got.cpu(), None, EPS, case["positions"], case["freq"], torch.arange(4) + 64, at, record, 1, 64)
    assert torch.equal(whole[60_000, :4].cpu(), at[1, :4])


def test_graph_follows_its_inputs_and_nothing_waits(run_rng):
    cases = [record_case(run_rng, RECORDS[0], 64, 1, True) for _ in range(3)]
    shape = (max(case["shape"][0] for case in cases), 9, RECORDS[0].width)
    cases = [case | {"shape": shape, "gap": 16, "block_size": 9, "slots": case["slots"].clamp(max=shape[0] * 9 - 1)} for case in cases]
    for case in cases:  # distinct slots again
        case["slots"] = torch.where(case["slots"] < 0, -1, torch.tensor(run_rng.sample(range(9, shape[0] * 9), 64)))
    names = ("x", "weight", "positions", "freq", "slots")
    live = {name: cases[0][name].cuda() for name in names}
    whole = new_cache(cases[0], "cuda")

    def call():
        return latent.write_record(live["x"], live["weight"], EPS, live["positions"], live["freq"], live["slots"], cache_of(cases[0], whole), RECORDS[0], 1, 9)

    call()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for case in cases:
        for name in names:
            live[name].copy_(case[name])
        whole.copy_(new_cache(case))
        graph.replay()
        check_records("replayed", case, (out, whole))


@triton.jit
def _codes(x, bf16, once, fp8, one_over, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(bf16 + i, triton_codes.to_bf16(v))
    tl.store(once + i, triton_codes.to_bf16_once(v))
    tl.store(fp8 + i, triton_codes.e4m3_bytes(v))
    tl.store(one_over + i, triton_codes.reciprocal(v))


def test_the_hardwares_roundings(run_rng):
    """bf16 and E4M3 of float32 as torch rounds them, in order; the reciprocal to two units of the last place."""
    g = torch.Generator().manual_seed(run_rng.randrange(1 << 30))
    x = torch.randn(1 << 20, generator=g) * 2.0 ** torch.randint(-20, 12, (1 << 20,), generator=g)
    x[: 1 << 12] = torch.arange(1 << 12) / 2**11  # ties of E4M3's small values
    x[1 << 12 : 1 << 13] = (torch.arange(1 << 12) << 15 | 0x3F800000).int().view(torch.float32)  # ties of bf16
    x = torch.where(x == 0, 1.0, x).cuda()
    bf16, once, one_over = (torch.empty(x.shape, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, torch.bfloat16, torch.float32))
    fp8 = torch.empty(x.shape, dtype=torch.uint8, device="cuda")
    _codes[(1 << 10,)](x, bf16, once, fp8, one_over, N=1 << 10)
    assert torch.equal(bf16, x.bfloat16()) and torch.equal(once, x.bfloat16())
    assert torch.equal(fp8, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert bool(((one_over.double() * x.double() - 1).abs() < 2.0**-22).all())
