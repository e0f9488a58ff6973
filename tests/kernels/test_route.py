# SPDX-License-Identifier: Apache-2.0
"""The router's slots and load against loops, how evenly replicas share, and Triton's form against torch's.

Run as a program, with Triton's interpreter, this file answers the cases of one file into another.
"""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepseek_v41_plugin.kernels import invariant, moe
from deepseek_v41_plugin.kernels.moe import Replicas, reference
from deepseek_v41_plugin.kernels.moe.replicas import place
from deepseek_v41_plugin.kernels.registry import OpError
from tests.interpreted import answers_of

CPU = torch.device("cpu")
GAP = 1e-5  # float32 tells scores apart that differ by more
POISON = -7_777_777


def random_replicas(rng, experts: int, rows: int, most: int = 5, dtype=torch.int64, record: bool = True) -> Replicas:
    """1 to `most` slots an expert, -1 behind them; a load that is not zero; some rows are padding."""
    counts = [rng.randint(1, most) for _ in range(experts)]
    order = rng.sample(range(sum(counts)), sum(counts))
    slots = [[order.pop() for _ in range(count)] + [-1] * (most - count) for count in counts]
    load = torch.tensor([rng.randrange(100) for _ in range(sum(counts))], dtype=torch.int32)
    return Replicas(torch.tensor(slots, dtype=dtype), torch.tensor(counts, dtype=dtype), load, torch.tensor(record), torch.tensor(rows, dtype=torch.int32), rng.randrange(64))


def copy(r: Replicas, device: str = "cpu") -> Replicas:
    return Replicas(*(getattr(r, name).clone().to(device) for name in ("slots", "counts", "load", "record", "rows")), r.first)


def placed_by_a_loop(experts: torch.Tensor, r: Replicas) -> tuple[list[list[int]], list[int]]:
    slots, load = [], r.load.tolist()
    for t, row in enumerate(experts.tolist()):
        slots.append([int(r.slots[e, (r.first + t) * 2654435769 % 2**32 * int(r.counts[e]) // 2**32]) for e in row])
        if bool(r.record) and t < int(r.rows):
            for slot in slots[-1]:
                load[slot] += 1
    return slots, load


def inputs(rng, rows: int, width: int = 32, experts: int = 12, dtype=torch.float32):
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return [torch.randn(*shape, generator=g).to(dtype) for shape in ((rows, width), (experts, width), (experts,))]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_slots_and_load_are_a_loops(run_rng, dtype):
    for rows in (0, 1, 2, 63, 200):
        for counted in (0, run_rng.randint(0, rows), rows, rows + 5):
            for record in (True, False):
                experts = torch.tensor([run_rng.sample(range(9), 3) for _ in range(rows)], dtype=torch.int64).reshape(rows, 3)
                r = random_replicas(run_rng, 9, counted, dtype=dtype, record=record)
                want, load = placed_by_a_loop(experts, r)
                got = place(experts, r)
                assert got.dtype == torch.int64 and got.shape == (rows, 3) and got.tolist() == want
                assert r.load.tolist() == load


def test_far_rows_do_not_overflow():
    """Rows past 2^20 of experts with 1024 replicas, the most that vLLM's map holds."""
    rows = (1 << 20) + 99
    r = Replicas(torch.arange(1024)[None], torch.tensor([1024]), torch.zeros(1024, dtype=torch.int32), torch.tensor(True), torch.tensor(rows, dtype=torch.int32))
    got = place(torch.zeros(rows, 1, dtype=torch.int64), r)
    assert got[-99:, 0].tolist() == [t * 2654435769 % 2**32 * 1024 // 2**32 for t in range(rows - 99, rows)]
    assert int(r.load.sum()) == rows


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_ranks_of_one_row_share_too(count):
    """32 ranks that decode one request each: as even as one rank's run of 32 rows."""
    chosen = []
    for rank in range(32):
        load = torch.zeros(count, dtype=torch.int32)
        r = Replicas(torch.arange(count)[None], torch.tensor([count]), load, torch.tensor(True), torch.tensor(1, dtype=torch.int32), rank)
        chosen.append(int(place(torch.zeros(1, 1, dtype=torch.int64), r)))
    shares = torch.bincount(torch.tensor(chosen), minlength=count)
    assert int(shares.max() - shares.min()) <= 4


def test_weights_and_experts_are_those_without_replicas(run_rng):
    x, weight, bias = inputs(run_rng, 50)
    ids, weights = moe.route(x, weight, bias, 3, 1.5, 2.0)
    r = random_replicas(run_rng, 12, 50)
    slots, same = moe.route(x, weight, bias, 3, 1.5, 2.0, replicas=r)
    owner = torch.full((len(r.load),), -1)
    for e, row in enumerate(r.slots.tolist()):
        owner[[slot for slot in row if slot >= 0]] = e
    assert torch.equal(owner[slots], ids) and torch.equal(same, weights)


@pytest.mark.parametrize("rows", [1, 40])
def test_tiles_of_the_invariant_mode_are_counted_once_and_in_place(run_rng, rows):
    x, weight, bias = inputs(run_rng, rows)
    r = random_replicas(run_rng, 12, rows - 1)
    with invariant.switched(True):
        ids, _ = moe.route(x, weight, bias, 3, 1.5)
        want, load = placed_by_a_loop(ids, r)
        got, _ = moe.route(x, weight, bias, 3, 1.5, replicas=r)
    assert got.tolist() == want and r.load.tolist() == load


def test_nothing_is_read_back(run_rng):
    """Tensors without values: any look at one raises."""
    x, weight, bias = inputs(run_rng, 7)
    r = random_replicas(run_rng, 12, 5)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        def fake(t):
            return mode.from_tensor(t)

        fakes = Replicas(*(fake(getattr(r, name)) for name in ("slots", "counts", "load", "record", "rows")))
        ids, weights = reference.route(fake(x), fake(weight), fake(bias), 3, 1.5, replicas=fakes)
        assert ids.shape == weights.shape == (7, 3)


def test_wrong_tensors_are_named(run_rng):
    good = random_replicas(run_rng, 4, 1)
    for name, bad in (("slots", good.slots[:3]), ("load", good.load.long()), ("record", good.record[None]), ("rows", good.rows.long())):
        tensors = {n: getattr(good, n) for n in ("slots", "counts", "load", "record", "rows")} | {name: bad}
        with pytest.raises(ValueError, match=f"^{name}.*give"):
            Replicas(**tensors)


# How evenly.  For a run of rows whose length q is a Fibonacci number, Denjoy and Koksma's inequality says that an
# interval of the circle is met q times its length, give or take its indicator's variation, 2, wherever the run
# starts: it needs |alpha - p/q| < 1/q^2, and alpha = 2654435769 / 2^32 lies within 2^-32 of the golden ratio's, so
# that holds for q up to 28657.  Any length is a sum of Fibonacci numbers, greedily taken; the run is cut so.
FIBONACCI = [1, 2]
while FIBONACCI[-1] < 20000:
    FIBONACCI.append(FIBONACCI[-1] + FIBONACCI[-2])


def parts(length: int) -> int:
    """How many Fibonacci numbers `length` is the sum of."""
    count = 0
    for f in reversed(FIBONACCI):
        if f <= length:
            length, count = length - f, count + 1
    return count


def shared(count: int, chosen: torch.Tensor) -> torch.Tensor:
    """Loads of the `count` replicas of expert 0 when the rows in the mask `chosen` choose it, the others expert 1."""
    r = Replicas(
        torch.stack((torch.arange(count), torch.full((count,), count))), torch.tensor([count, 1]),
        torch.zeros(count + 1, dtype=torch.int32), torch.tensor(True), torch.tensor(len(chosen), dtype=torch.int32),
    )
    place(torch.where(chosen, 0, 1)[:, None], r)
    return r.load[:count]


def test_a_run_of_rows_is_shared_evenly(run_rng):
    """Each replica gets n / count rows of a run of n, give or take 2 for each Fibonacci part of n."""
    for length in [f for f in FIBONACCI if f < 5000] + [run_rng.randint(1, 5000) for _ in range(40)]:
        for count in (2, 3, 4, 8, run_rng.randint(5, 40)):
            start = run_rng.randrange(3000)
            chosen = torch.zeros(start + length + 50, dtype=torch.bool)
            chosen[start : start + length] = True
            loads = shared(count, chosen)
            assert int(loads.sum()) == length
            off = float((loads - length / count).abs().max())
            assert off <= 2 * parts(length), f"{length} rows from {start} over {count}: off by {off}"


def test_random_rows_are_shared_evenly(run_rng):
    """Rows that choose an expert with probability p, as a skewed router makes them.

    A replica's load is binomial: p of the rows that fall to it, which the run's bound gives.  7 standard deviations
    are exceeded once in 10^11; a replica with a fifth more than its share is seen with certainty (12 of them).
    """
    for count, p in ((2, 0.9), (4, 0.5), (8, 0.5), (3, 0.25)):
        rows = int(8000 * count * (1 - p) / p) + 4000
        chosen = torch.rand(rows, generator=torch.Generator().manual_seed(run_rng.randrange(1 << 30))) < p
        share, slack = rows / count, 2 * parts(rows)
        bound = slack * p + 7 * ((share + slack) * p * (1 - p)) ** 0.5
        off = float((shared(count, chosen) - share * p).abs().max())
        assert off <= bound < 0.2 * share * p, f"{rows} rows with {p} over {count}: off by {off}"


# Triton.


def decidable(logits: torch.Tensor, bias: torch.Tensor, k: int, temperature: float) -> torch.Tensor:
    """Rows whose first k experts float32 settles: neighbours are equal in all they come from, or GAP apart."""
    key = torch.nn.functional.softplus(logits.double() / temperature).sqrt() + bias.double()
    order = key.sort(dim=-1, descending=True, stable=True).indices[:, : k + 1]
    key, logit, shift = key.gather(1, order), logits.gather(1, order), bias.expand_as(logits).gather(1, order)
    same = (logit[:, 1:] == logit[:, :-1]) & (shift[:, 1:] == shift[:, :-1])
    return (same | (key[:, :-1] - key[:, 1:] > GAP)).all(-1)


def random_case(rng, rows: int, experts: int, k: int, spread: float = 2.0, grid: float = 0.0, record: bool = True, padding: int = 0, most: int = 5) -> dict:
    """Logits [rows, experts] and what `pick` needs beside them; with `grid` most rows have ties."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(8 * rows + 64, experts, generator=g) * spread
    bias = torch.randn(3, generator=g)[torch.randint(0, 3, (experts,), generator=g)]
    temperature = rng.choice((1.0, 1.7))
    if grid:
        logits = (logits / grid).round() * grid
    logits = logits[decidable(logits, bias, k, temperature)][:rows].clone()
    assert len(logits) == rows
    replicas = random_replicas(rng, experts, rows - padding, most, rng.choice((torch.int64, torch.int32)), record)
    return {"logits": logits, "bias": bias, "top_k": k, "scaling": rng.uniform(0.5, 3), "temperature": temperature, "replicas": replicas}


def odd_numbers(rng) -> dict:
    """A padding row may hold anything: its slots must be slots all the same."""
    case = random_case(rng, 5, 12, 4)
    nan, inf = float("nan"), float("inf")
    case["logits"][0] = nan
    case["logits"][1, rng.randrange(12)] = nan
    case["logits"][2, rng.randrange(12)] = inf
    case["logits"][3] = -inf
    case["bias"] = torch.zeros(12)
    return case


def random_cases(rng) -> dict[str, dict]:
    """Few rows in all: the interpreter is slow."""
    return {
        "the target's": random_case(rng, 9, 384, 6),
        "the draft's": random_case(rng, 7, 128, 3, padding=2),
        "512 experts, 8 of them": random_case(rng, 3, 512, 8),
        "ties": random_case(rng, 17, 384, 6, grid=1.0),
        "all equal": random_case(rng, 2, 100, 5, grid=1e9),
        "wide": random_case(rng, 8, 9, 5, spread=25.0),
        "all of 6": random_case(rng, 4, 6, 6),
        "one of one": random_case(rng, 3, 1, 1),
        "one row": random_case(rng, 1, 128, 3),
        "no rows": random_case(rng, 0, 128, 3),
        "all padding": random_case(rng, 3, 64, 2, padding=3),
        "not recorded": random_case(rng, 5, 64, 4, record=False),
        "one replica each": random_case(rng, 5, 64, 4, most=1),
        "no replicas": random_case(rng, 5, 384, 6) | {"replicas": None},
        "odd numbers": odd_numbers(rng),
    }


def expected(case: dict, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(ids, weights, load) of the plain form."""
    logits, bias, r = case["logits"].to(device), case["bias"].to(device), case["replicas"]
    ids, weights = reference.pick(logits, bias, case["top_k"], case["scaling"], case["temperature"])
    if r is None:
        return ids, weights, None
    r = copy(r, device)
    return place(ids, r), weights, r.load


def answer(case: dict, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same of Triton's form."""
    from deepseek_v41_plugin.kernels.moe import triton_route

    r = None if case["replicas"] is None else copy(case["replicas"], device)
    given = (case["logits"].to(device), case["bias"].to(device), case["top_k"], case["scaling"], case["temperature"])
    return *triton_route.pick(*given, r), None if r is None else r.load


def check_equal(name: str, got, want) -> None:
    assert got[0].dtype == torch.int64 and torch.equal(got[0], want[0]), name
    torch.testing.assert_close(got[1], want[1], rtol=4e-6, atol=1e-12, equal_nan=True, msg=lambda text: f"{name}: {text}")
    assert want[2] is None or torch.equal(got[2], want[2]), name


def whole_routes(rng) -> list[dict]:
    """Whole calls: bfloat16 and float32 as Triton takes them, float64 and the invariant mode as it does not."""
    calls = []
    for dtype, switch in ((torch.bfloat16, False), (torch.float32, False), (torch.float64, False), (torch.float32, True)):
        x, weight, bias = inputs(rng, 60, dtype=dtype)
        bias = bias.float()
        with invariant.switched(switch):
            x = x[decidable(reference.logits(x, weight), bias, 3, 1.0)][:20]
        calls.append({"x": x, "weight": weight, "bias": bias, "switch": switch, "replicas": random_replicas(rng, 12, 19)})
    return calls


@pytest.fixture(scope="module")
def interpreted(run_seed, tmp_path_factory):
    """(cases, Triton's answers; calls, Triton's answers): one process with the interpreter answers all."""
    import random

    rng, folder = random.Random(f"{run_seed} route"), tmp_path_factory.mktemp("route")
    cases, calls = random_cases(rng), whole_routes(rng)
    answers = answers_of(__file__, (cases, calls), folder)
    return cases, answers[0], calls, answers[1]


def test_triton_equals_torch(interpreted):
    cases, answers, _, _ = interpreted
    assert set(cases) == set(answers)
    for name, case in cases.items():
        check_equal(name, answers[name], expected(case))


def test_the_cases_are_what_their_names_say(run_rng):
    """Ties within the first experts, and replicas in use, or the comparison shows nothing of them."""
    cases = random_cases(run_rng)
    logits, bias = cases["ties"]["logits"], cases["ties"]["bias"]
    best = (torch.nn.functional.softplus(logits).sqrt() + bias).sort(-1, descending=True).values[:, :7]
    assert int((best.diff() == 0).any(-1).sum()) > 8
    assert cases["the target's"]["replicas"].counts.unique().tolist() == [1, 2, 3, 4, 5]
    assert bool((cases["the target's"]["replicas"].slots == -1).any())


def test_whole_routes_of_triton(interpreted):
    _, _, calls, answers = interpreted
    for call, (ids, weights, load, launches) in zip(calls, answers, strict=True):
        r = copy(call["replicas"])
        with invariant.switched(call["switch"]):
            want = reference.route(call["x"], call["weight"], call["bias"], 3, 1.5, replicas=r)
        check_equal(str(call["x"].dtype), (ids, weights, load), (*want, r.load))
        assert launches == int(call["x"].dtype != torch.float64 and not call["switch"])


def test_cpu_takes_the_plain_form_and_says_why(monkeypatch):
    assert moe.route.choose(CPU).name == "torch"
    assert [row for row in moe.route.explain(CPU) if row[0] == "triton"] == [("triton", False, "Triton needs a GPU; its interpreter on the CPU is for tests")]
    monkeypatch.setenv("DSV41_OP_MOE_ROUTE", "triton")
    with pytest.raises(OpError, match="DSV41_OP_MOE_ROUTE=triton: Triton needs a GPU"):
        moe.route.choose(CPU)


def main(cases_file: str, answers_file: str) -> None:
    """Every new tensor is full of poison, so that what no kernel writes is seen."""
    from deepseek_v41_plugin.kernels.moe import triton_route

    kernel, launches, empty = triton_route._route, [], torch.empty

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    triton_route._route = Counted()
    torch.empty = lambda *shape, **options: empty(*shape, **options).fill_(POISON)
    cases, calls = torch.load(cases_file, weights_only=False)
    answers = {name: answer(case) for name, case in cases.items()}
    assert len(launches) == sum(len(case["logits"]) > 0 for case in cases.values())
    whole = []
    for call in calls:
        launches.clear()
        with invariant.switched(call["switch"]):
            ids, weights = triton_route.route(call["x"], call["weight"], call["bias"], 3, 1.5, replicas=call["replicas"])
        whole.append((ids, weights, call["replicas"].load, len(launches)))
    torch.save((answers, whole), answers_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
