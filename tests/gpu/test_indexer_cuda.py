# SPDX-License-Identifier: Apache-2.0
"""Triton's choice of compressed rows, compiled: torch's choice; the same bits in any company; no waiting for the host; in a CUDA graph."""

import pytest
import torch

from deepseek_v41_plugin.kernels import indexer
from deepseek_v41_plugin.kernels.indexer import reference, triton_select
from deepseek_v41_plugin.kernels.indexer.triton_select import Config
from tests.kernels.test_index_select import POISON, answer, check_equal, expected, on, random_case, random_cases

CUDA = torch.device("cuda")
REAL = {"heads": 32, "dim": 128, "rope": 64, "states": 64}


@pytest.fixture
def poisoned(monkeypatch):
    """New tensors are full of poison, so that what no kernel writes is seen."""
    empty = torch.empty

    def fill(*shape, **options):
        x = empty(*shape, **options)
        return x.copy_(torch.full(x.shape, float("nan") if x.dtype.is_floating_point else POISON, device=x.device).to(x.dtype))

    monkeypatch.setattr(torch, "empty", fill)


def test_cuda_takes_triton():
    assert indexer.select.choose(CUDA).name == "triton"


@pytest.mark.parametrize("config", [{}, {"rows": 4, "keys": 64, "chunk": 1024}, {"rows": 8, "keys": 64, "warps": 8, "chunk": 64}])
def test_triton_equals_torch(run_rng, poisoned, config):
    for _ in range(3):
        for name, case in random_cases(run_rng).items():
            check_equal(name, [x if x is None else x.cpu() for x in answer(case, "cuda", **config)], expected(case))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["plain", "source", "restricted"])
def test_real_sizes(run_rng, poisoned, kind, fp8):
    """Several chunks, several programs a tile, several slices; 1 to 9 rows a request."""
    candidates = None if kind == "plain" else (300, 8)
    rows, visible = [6, 1, 9, 2], [run_rng.randrange(513, 40_000), 514, 2400 + run_rng.randrange(20), 511]
    shape = {"topk": 512, "ratio": run_rng.choice([1, 2]), "padding": 3, **REAL}
    case = random_case(run_rng, rows, visible, fp8=fp8, candidates=candidates, restricted=kind == "restricted", **shape)
    want = expected(on(case, "cuda"), "cuda")
    for config in (None, Config(rows=1, chunk=4096), Config(rows=2, programs=7), Config(rows=8, warps=8, workspace=1 << 20)):
        check_equal(f"{kind} {config}", triton_select.select(**on(case, "cuda"), config=config), want)


def test_prefill(run_rng, poisoned):
    case = random_case(run_rng, [1500, 700], [3000, 700], topk=512, candidates=(128, 8), **REAL)
    check_equal("prefill", triton_select.select(**on(case, "cuda")), expected(on(case, "cuda"), "cuda"))


def random_numbers(rng, case: dict) -> dict:
    """Queries, weights and frequencies whose sums do round."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return case | {
        "q": torch.randn(case["q"].shape, generator=g).bfloat16(), "weights": torch.randn(case["weights"].shape, generator=g),
        "freq": torch.rand(case["freq"].shape, generator=g, dtype=torch.float64),
    }


def scores_of(case: dict, config: Config) -> torch.Tensor:
    """Scores [T, bound] of a case as the kernels compute them."""
    c = on(case, "cuda")
    rows = len(c["q"])
    return triton_select._scored(
        c["q"], c["weights"], c["positions"], c["freq"], c["first"], c["keys"], c["record"], c["ratio"], 0, c["bound"], c["candidates"],
        c["allowed"], c["candidates"] is not None and c["allowed"] is None, 0, rows, c["most_rows"], config,
    )[0][:, : c["bound"]]


def test_a_score_has_the_same_bits_in_any_company(run_rng):
    """Rows of a tile, warps, keys of a tile, programs, and a row's own blocks instead of the request's keys."""
    case = random_numbers(run_rng, random_case(run_rng, [7, 2], [900, 333], candidates=(200, 8), **REAL)) | {"most_rows": 7}
    seen = torch.arange(case["bound"]) < (case["positions"][:, None] + 1) // case["ratio"]
    want = scores_of(case, Config(rows=4)).cpu()[seen]
    for config in (Config(rows=1), Config(rows=2), Config(rows=8), Config(rows=8, warps=8), Config(rows=4, keys=128), Config(rows=1, keys=128, programs=3)):
        assert torch.equal(scores_of(case, config).cpu()[seen], want), config
    alone = case | {"q": case["q"][3:4], "weights": case["weights"][3:4], "positions": case["positions"][3:4], "req": case["req"][3:4],
                    "first": torch.tensor([0, 1, 1]), "most_rows": 1}
    assert torch.equal(scores_of(alone, Config(rows=1)).cpu()[0][seen[3]], scores_of(case, Config()).cpu()[3][seen[3]])
    blocks = torch.arange(-(-case["bound"] // 8), dtype=torch.int32).expand(9, -1).contiguous()
    gathered = scores_of(case | {"allowed": blocks, "bound": blocks.shape[1] * 8}, Config(rows=1)).cpu()[:, : case["bound"]]
    assert torch.equal(gathered[seen], want)


def test_scores_are_close_to_exact_ones(run_rng):
    case = random_numbers(run_rng, random_case(run_rng, [5], [700], **REAL))
    got = scores_of(case, Config()).cpu().double()
    q = case["record"].round(reference.rope(case["q"], case["positions"], case["freq"]).double())
    table = case["keys"].block_table[0, : -(-700 // 64)].long()
    keys = case["record"].decode(case["keys"].cache[table].flatten(0, 1)[:700], torch.float64)
    want = reference.scores(q, case["weights"].double(), keys, (case["positions"] + 1) // case["ratio"])
    seen = want > float("-inf")
    off = (got[:, :700][seen] - want[seen]).abs() / (case["weights"].abs().sum(1)[:, None] * 128).expand_as(want)[seen]
    # A sine that rounds otherwise moves a query by a step of FP4, rarely.
    assert float(off.median()) < 1e-6 and float(off.max()) < 1e-2


@pytest.mark.parametrize("kind", ["plain", "source", "restricted"])
def test_no_sync_and_graph(run_rng, kind):
    """One graph of 4 requests of up to 6 rows; between its replays everything on the device is written in place."""
    candidates = None if kind == "plain" else (80, 8)
    cases = []
    for rows in ([6, 6, 6, 6], [1, 6, 2, 3], [0, 6, 1, 6]):
        visible = [run_rng.randrange(1, 3000) for _ in rows]
        case = random_case(run_rng, rows, visible, topk=512, candidates=candidates, restricted=kind == "restricted", padding=24 - sum(rows), **REAL)
        cases.append(on(case | {"bound": 4000, "most_rows": 6}, "cuda"))
    largest = max(case["keys"].cache.shape[0] for case in cases)
    width = max(case["keys"].block_table.shape[1] for case in cases)
    cache = torch.zeros(largest, 64, 68, dtype=torch.uint8, device="cuda")
    table = torch.zeros(4, width, dtype=torch.int32, device="cuda")
    live = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in cases[0].items()}
    live["keys"] = cases[0]["keys"]._replace(cache=cache, block_table=table)

    def write(case):
        for name, x in case.items():
            if isinstance(x, torch.Tensor):
                live[name].copy_(x)
        cache[: case["keys"].cache.shape[0]].copy_(case["keys"].cache)
        table[:, : case["keys"].block_table.shape[1]].copy_(case["keys"].block_table)

    write(cases[0])
    triton_select.select(**live)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_select.select(**live)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_select.select(**live)
    for i, case in enumerate(cases):
        write(case)
        graph.replay()
        check_equal(f"{kind} replay {i}", out, expected(case, "cuda"))
