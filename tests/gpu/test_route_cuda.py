# SPDX-License-Identifier: Apache-2.0
"""Triton's router, compiled: torch's slots, load and weights; no waiting for the host; in a CUDA graph."""

import dataclasses

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, moe
from deepseek_v41_plugin.kernels.moe import reference, triton_route
from tests.kernels.test_route import GAP, POISON, answer, check_equal, copy, decidable, expected, random_case, random_cases, random_replicas, whole_routes

CUDA = torch.device("cuda")


@pytest.fixture
def poisoned(monkeypatch):
    """New tensors are full of poison, so that what no kernel writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(POISON))


def test_cuda_takes_triton():
    assert moe.route.choose(CUDA).name == "triton"


def test_triton_equals_torch(run_rng, poisoned):
    for _ in range(5):
        for name, case in random_cases(run_rng).items():
            check_equal(name, answer(case, "cuda"), expected(case, "cuda"))


@pytest.mark.parametrize(("experts", "k"), [(384, 6), (128, 3)])
def test_many_rows(run_rng, poisoned, experts, k):
    """Atomic additions from all over the device: the load is torch's to the last one."""
    case = random_case(run_rng, 4096, experts, k, padding=100)
    got = answer(case, "cuda")
    check_equal("many rows", got, expected(case, "cuda"))
    assert int(got[2].sum()) == (4096 - 100) * k + int(case["replicas"].load.sum())


def test_whole_routes(run_rng, poisoned):
    for call in whole_routes(run_rng):
        x, weight, bias = (call[name].cuda() for name in ("x", "weight", "bias"))
        mine, plain = copy(call["replicas"], "cuda"), copy(call["replicas"], "cuda")
        with invariant.switched(call["switch"]):
            # The product is another one than the CPU's, so the rows that float32 settles are others too.
            x = x[decidable(reference.logits(x, weight).cpu(), bias.cpu(), 3, 1.0).cuda()]
            got = moe.route(x, weight, bias, 3, 1.5, replicas=mine)
            want = reference.route(x, weight, bias, 3, 1.5, replicas=plain)
        check_equal(str(x.dtype), (*got, mine.load), (*want, plain.load))


@pytest.mark.parametrize("fn", [triton_route.route, reference.route], ids=["triton", "torch"])
def test_no_sync(run_rng, fn):
    """After one warm call, which compiles."""
    g = torch.Generator().manual_seed(run_rng.randrange(1 << 30))
    weight, bias = torch.randn(384, 256, generator=g).bfloat16().cuda(), torch.randn(384, generator=g).cuda()
    r = copy(random_replicas(run_rng, 384, 60), "cuda")
    calls = [torch.randn(rows, 256, generator=g).bfloat16().cuda() for rows in (64, 1, 7, 64)]
    for x in calls:
        fn(x, weight, bias, 6, 1.5, replicas=r)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in calls:
            fn(x, weight, bias, 6, 1.5, replicas=r)
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_graph_follows_maps_switch_and_padding(run_rng):
    """One graph; between its replays the maps, the switch, the number of rows and the logits are written in place."""
    cases = [random_case(run_rng, 32, 384, 6, padding=run_rng.randrange(32), record=bool(i % 2)) for i in range(4)]
    cases = [case | {"scaling": 1.5, "temperature": 1.0} for case in cases]
    for case in cases:
        good = decidable(case["logits"], case["bias"], 6, 1.0)
        case["logits"] = case["logits"][good][torch.arange(32) % int(good.sum())]
    slots = sum(len(case["replicas"].load) for case in cases)
    for case in cases:  # one size of all tensors and one type
        r = case["replicas"]
        case["replicas"] = dataclasses.replace(
            r, slots=r.slots.long(), counts=r.counts.long(), load=torch.nn.functional.pad(r.load, (0, slots - len(r.load)))
        )
    logits, bias, live = cases[0]["logits"].cuda(), cases[0]["bias"].cuda(), copy(cases[0]["replicas"], "cuda")

    def call():
        return triton_route.pick(logits, bias, 6, 1.5, 1.0, live)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for i, case in enumerate(cases):
        logits.copy_(case["logits"])
        bias.copy_(case["bias"])
        for name in ("slots", "counts", "load", "record", "rows"):
            getattr(live, name).copy_(getattr(case["replicas"], name))
        graph.replay()
        check_equal(f"replay {i}", (*out, live.load), expected(case, "cuda"))


def test_scores_far_apart_in_size(run_rng):
    """The series for softplus against float64, over all of float32's useful range."""
    x = torch.linspace(-85, 85, 20_001)[:, None]
    for rows in x.split(4096):
        # Two experts, one with a score of 1: the first's weight over the second's is its score.
        logits = torch.cat((rows, torch.full_like(rows, 0.5413248546129181)), 1).cuda()
        ids, weights = triton_route.pick(logits, torch.tensor([9e3, 0.0], device="cuda"), 2, 1.0)
        assert bool((ids == torch.tensor([0, 1], device="cuda")).all())
        score = (weights[:, 0].double() / weights[:, 1].double()).cpu()
        want = torch.nn.functional.softplus(rows[:, 0].double()).sqrt()
        assert float((score / want - 1).abs().max()) < GAP
