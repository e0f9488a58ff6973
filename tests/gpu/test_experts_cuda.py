# SPDX-License-Identifier: Apache-2.0
"""Triton's experts, compiled: torch's numbers, weights to the last bit, no waiting for the host, in a CUDA graph."""

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, moe
from deepseek_v41_plugin.kernels.formats.rowfp8 import row_quantize
from deepseek_v41_plugin.kernels.moe import reference, triton_experts
from tests.kernels.test_experts import (
    CONFIGS, POISON, WEIGHT_CONFIGS, answer, bits_of_many, bits_of_rows, alone_and_together, check_close, check_decoded, check_groups, check_rows,
    decoded, expected, group, on, part, random_case, random_cases, random_groupings, random_rows, rows_before, weight_cases,
)

CUDA = torch.device("cuda")
HIDDEN, INNER = 1280, 640  # five blocks: the pipeline fills, goes round and drains


@pytest.fixture
def poisoned(monkeypatch):
    """New tensors are full of poison, so that what no kernel writes is seen."""
    empty = torch.empty

    def poison(*shape, **options):
        new = empty(*shape, **options)
        new.view(torch.uint8).fill_(POISON)
        return new

    monkeypatch.setattr(torch, "empty", poison)


def test_cuda_takes_triton():
    assert moe.experts.choose(CUDA).name == "triton" and moe.experts.choose(CUDA).graphs


@pytest.mark.parametrize("config", WEIGHT_CONFIGS)
def test_weights_are_decoded_exactly(run_rng, config):
    for case in weight_cases(run_rng):
        if case["spread"] <= WEIGHT_CONFIGS[config]:
            check_decoded(case, decoded(case, config, "cuda"))


def test_pairs_lie_in_tiles_as_a_loop_puts_them(run_rng, poisoned):
    for case in random_groupings(run_rng):
        check_groups(case, group(case, "cuda"))
    ids = torch.stack([torch.randperm(384, device="cuda")[:6] for _ in range(3000)]).cpu()
    case = {"ids": ids, "first": 96, "experts": 96, "block_n": 64}
    check_groups(case, group(case, "cuda"))


def test_rows_are_rounded_as_torch_does(run_rng):
    for x in random_rows(run_rng):
        check_rows(x, rows_before(x, "cuda"))
        check_rows(x, rows_before(x, "cuda", row_quantize(x.cuda())))


def test_calls_are_torchs(run_rng, poisoned):
    """Torch's on the CPU, where sums are float32's; the tensor cores' own sums of 32 or 128 columns are coarser."""
    for name, (case, config) in random_cases(run_rng).items():
        check_close(name, answer(case, config, "cuda").cpu(), expected(case), 2.0**-6)


@pytest.mark.parametrize("config", CONFIGS)
def test_larger_calls_are_torchs(run_rng, poisoned, config):
    case = random_case(run_rng, 300, HIDDEN, INNER, 3, 12, of=16, first=2)
    for _ in range(3):
        check_close(config, answer(case, config, "cuda"), expected(case, "cuda"), 2.0**-6)


def test_a_row_has_the_same_bits_in_any_company(run_rng):
    for case in (alone_and_together(run_rng), random_case(run_rng, 200, HIDDEN, INNER, 3, 12)):
        for some in (bits_of_rows(case, "cuda"), bits_of_many(case, "cuda")):
            for other in some[1:]:
                assert torch.equal(some[0], other)


def test_the_invariant_mode_is_the_decode_step(run_rng):
    case = on(random_case(run_rng, 1500, HIDDEN, INNER, 3, 12), "cuda")
    rows = torch.tensor([5, 1400], device="cuda")
    with invariant.switched(True):
        whole, few = moe.experts(*case.values(), narrow=True), moe.experts(*part(case, rows).values(), narrow=True)
    assert torch.equal(whole[rows], few)


def test_again_and_again_the_same(run_rng):
    case = on(random_case(run_rng, 700, HIDDEN, INNER, 6, 64), "cuda")
    for config in CONFIGS:
        first = answer(case, config, "cuda")
        for _ in range(5):
            assert torch.equal(answer(case, config, "cuda"), first)


def test_no_sync(run_rng):
    """After one warm call, which compiles."""
    cases = [on(random_case(run_rng, rows, 256, 128, 2, 8), "cuda") for rows in (1, 64, 1100)]
    for case in cases:
        moe.experts(*case.values())
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for case in cases:
            moe.experts(*case.values())
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("rows", [1, 33])
def test_a_graph_follows_rows_ids_and_weights(run_rng, rows):
    """One graph; between its replays rows, ids (also -1: padding) and the experts' bytes are written in place."""
    cases = [on(random_case(run_rng, rows, 256, 128, 2, 8, of=10), "cuda") for _ in range(4)]
    live = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in cases[0].items()}
    cases[2]["ids"][rows // 2 :] = -1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moe.experts(*live.values())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.experts(*live.values())
    for i, case in enumerate(cases):
        for name, value in case.items():
            if isinstance(value, torch.Tensor):
                live[name].copy_(value)
        graph.replay()
        want = reference.experts(**case)
        held = want.abs().sum(-1) > 0
        check_close(f"replay {i}", out[held], want[held], 2.0**-6)
        assert not bool(out[~held].any())


def test_the_released_sizes(run_rng):
    """V4.1's layer with 24 experts: every row of the last expert, all configs in use."""
    case = on(random_case(run_rng, 1, 5120, 2304, 6, 24, low=110, spread=5), "cuda")
    g = torch.Generator(device="cuda").manual_seed(run_rng.randrange(1 << 30))
    for rows in (1, 8, 300, 1500, 6000):
        case |= {
            "x": torch.randn(rows, 5120, device="cuda", generator=g).bfloat16(), "weights": torch.rand(rows, 6, device="cuda", generator=g),
            "ids": torch.rand(rows, 24, device="cuda", generator=g).argsort(-1)[:, :6],
        }
        for narrow in (False, True):
            check_close(f"{rows} rows", triton_experts.experts(**case, narrow=narrow), reference.experts(**case), 2.0**-6)
