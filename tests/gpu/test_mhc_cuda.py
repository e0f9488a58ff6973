# SPDX-License-Identifier: Apache-2.0
"""mHC of Triton, compiled: torch's values, the same bits for a row whatever the rows beside it, no waiting, in a CUDA graph."""

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, mhc
from deepseek_v41_plugin.kernels.mhc import Entered, MixerWeights, reference, triton_ends, triton_turn
from deepseek_v41_plugin.kernels.mhc.triton_turn import Config
from tests.kernels.test_mhc import EPS, answer, check, entering, leaving, poisoned, random_case, random_cases

CUDA = torch.device("cuda")
ONE, MANY, WIDE = Config(64, 4, 1, False), Config(64, 4, 2, True), Config(128, 8, 2, True)
ACCURACY = 3e-5  # of the mixes: tensor cores cut their sums off where a CPU rounds


@pytest.fixture
def poison(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: poisoned(empty(*shape, **options)))


def to(x, device: str):
    """Tensors in dicts and tuples of any depth."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: to(value, device) for key, value in x.items()}
    if isinstance(x, tuple):
        moved = [to(value, device) for value in x]
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return x


def flat(x) -> list[torch.Tensor]:
    """The tensors in nested tuples, as bytes."""
    if isinstance(x, torch.Tensor):
        return [x.contiguous().view(torch.uint8)]
    return [t for part in x or () for t in flat(part)]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


def turn(case: dict, config: Config | None = None, rows=slice(None)) -> tuple[torch.Tensor, Entered]:
    given = [x[rows] for x in (*leaving(case), case["pre"])]
    return mhc.turn(*given, *entering(case), **({"config": config} if config else {}))


def rows_of(x, rows):
    if isinstance(x, torch.Tensor):
        return x[rows]
    parts = [rows_of(part, rows) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


def test_cuda_takes_triton():
    assert all(op.choose(CUDA).name == "triton" for op in (mhc.enter, mhc.turn, mhc.leave, mhc.last))


def test_triton_is_the_plain_form(run_rng, poison):
    for name, case in random_cases(run_rng).items():
        check(name, case, to(answer(case, "cuda"), "cpu"), ACCURACY)


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64, 257, 2049])
def test_the_targets_size(run_rng, poison, rows):
    case = random_case(run_rng, rows, 5120)
    check(f"{rows} rows", to(case, "cuda"), answer(case, "cuda"), ACCURACY)


def test_bits_do_not_depend_on_tiles_and_groups(run_rng):
    for dim in (5120, 1344):
        case = to(random_case(run_rng, 300, dim), "cuda")
        want = turn(case, ONE)
        for config in (MANY, WIDE, ONE._replace(stages=2), MANY._replace(stages=1)):
            assert same(turn(case, config), want), f"{config} at {dim}"


def test_a_row_has_the_same_bits_in_any_company(run_rng):
    """While the switch is on, through the whole table by the number of rows."""
    case = to(random_case(run_rng, 1500, 5120), "cuda")
    with invariant.switched(True):
        want = turn(case)
        for count in (1, 1, 2, 15, 16, 17, 64, 65, 512, 513, 1025):
            rows = torch.tensor(run_rng.sample(range(1500), count), device="cuda")
            assert same(turn(case, rows=rows), rows_of(want, rows)), f"{count} rows"
            stream, entered = rows_of(want, rows)
            again = mhc.enter(stream, case["pre"][rows], *entering(case))
            assert same(again, entered), f"{count} rows entered"


def test_leaving_and_entering_is_turning(run_rng):
    for rows in (5, 400):
        case = to(random_case(run_rng, rows, 5120), "cuda")
        stream, entered = turn(case)
        left = mhc.leave(*leaving(case))
        assert float((left != stream).float().mean()) < 1e-3
        last = mhc.last(*leaving(case), case["pre"], case["weight"], EPS)
        assert float((last != entered.x).float().mean()) < 1e-2


@pytest.mark.parametrize("rows", [16385, 65536])
def test_far_rows(run_rng, rows):
    """Offsets beyond 2^31 bytes: the last rows as if they were alone."""
    case = to(random_case(run_rng, 64, 5120), "cuda")
    whole = {name: x.repeat(rows // 64 + 1, *[1] * (x.dim() - 1))[-rows:] for name, x in case.items() if name in ("stream", "y", "post", "comb", "pre")}
    want = turn(case, MANY)
    got = turn(case | whole)
    for part in (slice(-64, None), slice(-640, -576)):
        assert same(rows_of(got, part), want)
    assert same(mhc.leave(*leaving(case | whole))[-64:], mhc.leave(*leaving(case)))


@pytest.mark.parametrize("rows", [3, 40, 600])
def test_graph_follows_its_inputs_and_nothing_waits(run_rng, rows):
    cases = [to(random_case(run_rng, rows, 5120), "cuda") for _ in range(3)]
    mixer = cases[0]["mixer"]
    cases = [case | {"mixer": mixer, "weight": cases[0]["weight"]} for case in cases]
    want = [(turn(case), mhc.last(*leaving(case), case["pre"], case["weight"], EPS)) for case in cases]
    live = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in cases[0].items()}
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        turn(live)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = (turn(live), mhc.last(*leaving(live), live["pre"], live["weight"], EPS))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for case, expected in zip(cases, want, strict=True):
        for name in ("stream", "y", "post", "comb", "pre"):
            live[name].copy_(case[name])
        graph.replay()
        assert same(out, expected)


def test_other_streams_take_the_plain_form(run_rng):
    case = to(random_case(run_rng, 5, 96, dtype=torch.float32), "cuda")
    stream, entered = mhc.turn(*leaving(case), case["pre"], *entering(case))
    assert torch.equal(stream, reference.expand(*leaving(case))) and entered.fp8 is None
    assert triton_turn.taken(stream.bfloat16()) and not triton_turn.taken(stream[:, :3].bfloat16()) and triton_ends.taken is triton_turn.taken
    assert isinstance(case["mixer"], MixerWeights)
