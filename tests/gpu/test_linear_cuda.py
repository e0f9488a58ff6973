# SPDX-License-Identifier: Apache-2.0
"""The dense Linears, compiled: torch's values, the same bits for any T, run after run; nothing waits for the host; in CUDA graphs."""

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, linear
from deepseek_v41_plugin.kernels.formats.blocks import dense_weight
from deepseek_v41_plugin.kernels.formats.rowfp8 import RowFp8, row_quantize
from deepseek_v41_plugin.kernels.linear import RowWeight, cuda, pack_group, reference, row_weight, triton_group, triton_rows, triton_skinny
from deepseek_v41_plugin.kernels.registry import OPS
from tests.kernels.test_linear import (
    EPS, answer_groups, answer_products, answer_rows, check_groups, check_products, check_rows, fp8_values, generator, group_cases, product_cases,
    random_row_weight, row_cases, same_rows, spread,
)

CUDA = torch.device("cuda")
# The model's own at tensor parallel 1 and 8, and the smallest of each kind: (outputs, depth).
SHAPES = [(1792, 5120), (4096, 1280), (5120, 8192), (4608, 5120), (5120, 2304), (5120, 288), (512, 1280), (5120, 1024)]


@pytest.fixture
def poisoned(monkeypatch):
    """New tensors are NaN, so that what no kernel writes is seen."""
    empty = torch.empty

    def poison(*shape, **options):
        x = empty(*shape, **options)
        x.untyped_storage().fill_(255)
        return x

    monkeypatch.setattr(torch, "empty", poison)


def on_gpu(pair):
    return type(pair)(*(part.cuda() for part in pair))


def test_cuda_takes_the_kernels():
    for op in (linear.quantize_rows, linear.norm_rows, linear.swiglu_rows, linear.group_linear, linear.wide_linear, OPS["row_linear"]):
        assert op.choose(CUDA).name == "triton"


def test_rows(run_rng, poisoned):
    for _ in range(3):
        for name, case in row_cases(run_rng).items():
            check_rows(name, case, answer_rows(case, "cuda"), "cuda")


def test_every_e4m3_tie_rounds_to_even():
    """Each E4M3 value, and each half way to the next, under one scale: 448 is in every row."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (grid[1:] + grid[:-1]) / 2
    x = torch.cat((grid, halves, -grid, -halves))[None].bfloat16()
    assert same_rows(triton_rows.quantize_rows(x.cuda()), on_gpu(row_quantize(x)))
    assert same_rows(on_gpu(row_quantize(x)), row_quantize(x.cuda()))


def test_products(run_rng, poisoned):
    for _ in range(3):
        for name, case in product_cases(run_rng).items():
            check_products(name, case, answer_products(case, "cuda"), exact=False)


def test_groups(run_rng, poisoned):
    for _ in range(3):
        for name, case in group_cases(run_rng).items():
            check_groups(name, case, answer_groups(case, "cuda"), bound=3e-5)


def test_every_byte_under_every_scale():
    """The inline assembly's table: 256 bytes by scales from 2^-107 to 2^100, exact in bf16; but for NaN's two."""
    weight = torch.arange(256, dtype=torch.uint8).repeat(32, 4).contiguous()
    weight[(weight & 0x7F) == 0x7F] = 0
    weight = weight.view(torch.float8_e4m3fn).cuda()
    words = pack_group(weight)
    for byte in range(20, 228, 8):
        scale = torch.arange(byte, byte + 32, dtype=torch.uint8, device=CUDA)[None].clamp(max=227).contiguous()
        assert torch.equal(triton_group.dequantized(words, scale).double(), dense_weight(weight, scale, torch.float64)), byte


@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_model_shapes_and_row_invariance(run_rng, outputs, depth):
    """A row's bits are the same in all configurations, at any T, at any place, in every one of many runs."""
    g = generator(run_rng)
    w = on_gpu(random_row_weight(g, outputs, depth))
    x = on_gpu(row_quantize(spread(g, 200, depth)))
    want = None
    for rows in (200, 128, 64, 33, 17, 16, 8, 1):
        first = run_rng.randrange(200 - rows + 1)
        part = RowFp8(x.q[first : first + rows].clone(), x.scale[first : first + rows].clone())
        for config in triton_skinny.CONFIGS.values():
            for _ in range(5):
                got = triton_skinny.row_product(part, w, torch.float32, config)
                if want is None:
                    want = got
                    exact, size = x.values(torch.float64) @ w.values(torch.float64).T, x.values(torch.float64).abs() @ w.values(torch.float64).abs().T
                    assert bool(((got.double() - exact).abs() <= 2.0**-11 * size).all())
                assert torch.equal(got, want[first : first + rows]), (rows, config)


@pytest.mark.parametrize(("groups", "outputs", "depth"), [(8, 1024, 4096), (1, 1024, 4096)])
def test_group_row_invariance(run_rng, groups, outputs, depth):
    g = generator(run_rng)
    words = pack_group(fp8_values(g, groups * outputs, depth).cuda())
    scale = torch.randint(110, 125, (groups * outputs // 32, depth // 32), generator=g).to(torch.uint8).cuda()
    o = torch.randn(150, groups, depth, generator=g).bfloat16().cuda()
    want = triton_group.group_product(o, words, scale, triton_group.INVARIANT)
    torch.testing.assert_close(want, reference.group_linear(o, words, scale), rtol=2.0**-6, atol=2.0**-6 * float(want.abs().max()))
    for rows in (150, 64, 31, 16, 1):
        first = run_rng.randrange(150 - rows + 1)
        for config in triton_group.CONFIGS.values():
            for _ in range(5):
                assert torch.equal(triton_group.group_product(o[first : first + rows].clone(), words, scale, config), want[first : first + rows]), (rows, config)


@pytest.mark.parametrize("fast", [False, True])
def test_library_and_kernel_agree(run_rng, monkeypatch, fast):
    """Many rows: the library's products, FP8, groups and bf16 with float32 results."""
    monkeypatch.setattr(cuda, "FAST_ACCUM", fast)
    g = generator(run_rng)
    x, w = on_gpu(row_quantize(torch.randn(300, 1280, generator=g))), on_gpu(RowWeight(torch.randn(4096, 1280, generator=g).to(torch.float8_e4m3fn), torch.full((4096,), 2.0**-5)))
    got, want = cuda.row_linear(x, w), triton_skinny.row_product(x, w, torch.float32, triton_skinny.INVARIANT)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=2.0**-6, atol=2.0**-6 * float(want.abs().max()))
    a, b = torch.randn(300, 5120, generator=g).bfloat16().cuda(), torch.randn(384, 5120, generator=g).bfloat16().cuda()
    torch.testing.assert_close(cuda.wide_linear(a, b), triton_skinny.wide_product(a, b, triton_skinny.INVARIANT), rtol=0, atol=1e-2)
    weight, scale = fp8_values(g, 256, 512).cuda(), torch.randint(110, 125, (8, 16), generator=g).to(torch.uint8).cuda()
    o = torch.randn(300, 2, 512, generator=g).bfloat16().cuda()
    want = reference.group_linear(o, weight, scale)
    for form in (weight, pack_group(weight)):
        torch.testing.assert_close(cuda.group_linear(o, form, scale), want, rtol=2.0**-6, atol=2.0**-6 * float(want.abs().max()))


def test_invariant_mode_at_every_t(run_rng):
    g = generator(run_rng)
    x, w = on_gpu(row_quantize(spread(g, 1500, 512))), on_gpu(random_row_weight(g, 192, 512))
    with invariant.switched(True):
        whole = linear.row_linear(x, w)
        for rows in (1, 100, 129, 1025):
            assert torch.equal(linear.row_linear(RowFp8(x.q[:rows].clone(), x.scale[:rows].clone()), w), whole[:rows])


def test_row_weight_of_a_device(run_rng):
    g = generator(run_rng)
    weight, scale = fp8_values(g, 96, 160), torch.randint(100, 104, (3, 5), generator=g).to(torch.uint8)
    weight[::32, ::32] = 448.0
    here, there = row_weight(weight, scale), row_weight(weight.cuda(), scale.cuda())
    assert torch.equal(here.q.view(torch.uint8), there.q.cpu().view(torch.uint8)) and torch.equal(here.scale, there.scale.cpu())


def calls(run_rng, rows: int):
    """A layer's worth of calls, on inputs that may be written in place: (inputs, call)."""
    g = generator(run_rng)
    w1, w2, norm = on_gpu(random_row_weight(g, 1024, 1280)), on_gpu(random_row_weight(g, 256, 512)), torch.randn(1280, generator=g).bfloat16().cuda()
    router = torch.randn(384, 1280, generator=g).bfloat16().cuda()
    words, scale = pack_group(fp8_values(g, 256, 512).cuda()), torch.randint(110, 125, (8, 16), generator=g).to(torch.uint8).cuda()
    inputs = torch.randn(rows, 1280, generator=g).bfloat16().cuda(), torch.randn(rows, 2, 512, generator=g).bfloat16().cuda()

    def call():
        x, o = inputs
        y, q = linear.norm_rows(x, norm, EPS)
        gate_up = linear.row_linear(q, w1)
        return y, linear.row_linear(linear.swiglu_rows(gate_up, 10.0), w2), linear.wide_linear(x, router), linear.group_linear(o, words, scale), linear.quantize_rows(x).q.float()

    return inputs, call


@pytest.mark.parametrize("rows", [1, 16, 100, 300])
def test_no_sync_and_graphs(run_rng, rows):
    """After one warm call; three replays on new inputs, then eager calls: counters are as they were."""
    inputs, call = calls(run_rng, rows)
    call()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        for x in inputs:
            x.copy_(torch.randn_like(x))
        graph.replay()
        graph.replay()
        for got, want in zip(out, call(), strict=True):
            assert torch.equal(got, want)
    assert all(not bool(counter.any()) for counter in triton_skinny._counters.values())


def test_a_graph_before_any_call(run_rng):
    """A weight that was never called before its capture takes counters of the graph; eager calls before the replay have their own."""
    g = generator(run_rng)
    w, x = on_gpu(random_row_weight(g, 64, 1280)), on_gpu(row_quantize(spread(g, 3, 1280)))
    linear.row_linear(x, on_gpu(random_row_weight(g, 64, 1280)))  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear.row_linear(x, w)
    want = linear.row_linear(x, w)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, want) and torch.equal(linear.row_linear(x, w), want)
