# SPDX-License-Identifier: Apache-2.0
"""`attend`: the composed reference against loops in float64, and Triton's form against the reference.

Run as a program, with Triton's interpreter, this file answers the cases of one file into another; without files it compiles.
"""

import random
import sys

import pytest
import torch

from deepseek_v41_plugin.kernels import attention, invariant
from deepseek_v41_plugin.kernels.attention import reference
from deepseek_v41_plugin.kernels.formats.records import Fp8RopeRecord, GlobalRecord, WindowRecord
from deepseek_v41_plugin.kernels.paging import Paged
from deepseek_v41_plugin.kernels.registry import OpError
from tests.interpreted import answers_of, compile_for_hopper, run

CPU = torch.device("cpu")
POISON = -7_777_777


def records(dim: int, turned: int, name: str):
    """(window record, compressed record) of a cache format."""
    return (Fp8RopeRecord(dim, turned),) * 2 if name == "fp8_ds_mla" else (WindowRecord(dim), GlobalRecord(dim))


def pages(rng, g, record, lengths: list[int], states: int, shared: int, pad: int) -> tuple[Paged, torch.Tensor]:
    """A cache whose blocks lie shuffled, NaN wherever no request may read, and its values float64 [requests, longest, dim].

    The first `shared` blocks of all requests are the same ones. Blocks are `pad` bytes apart from each other.
    """
    counts = [-(-length // states) for length in lengths]
    columns = max(max(counts), 1) + rng.randrange(3)
    total = sum(counts) + 3
    free = rng.sample(range(total), total)
    table = torch.full((len(lengths), columns), free.pop(), dtype=torch.int32)  # what lies behind is a block of NaN
    raw = torch.full((total, states * record.width + pad), rng.choice((0x7F, 0xFF)), dtype=torch.uint8)
    cache = raw[:, : states * record.width].unflatten(1, (states, record.width))
    values = torch.zeros(len(lengths), max(*lengths, 1), record.dim, dtype=torch.float64)
    for r, length in enumerate(lengths):
        for b in range(counts[r]):
            same = r > 0 and b < min(shared, lengths[0] // states)
            table[r, b] = table[0, b] if same else free.pop()
            rows = range(b * states, min(b * states + states, length))
            if not same:
                sizes = 2.0 ** torch.randint(-3, 4, (len(rows), record.dim // 16, 1), generator=g)
                x = (torch.randn(len(rows), record.dim // 16, 16, generator=g) * sizes).flatten(1)
                cache[table[r, b], : len(rows)] = record.encode(x)
            values[r, rows.start : rows.stop] = record.decode(cache[table[r, b], : len(rows)], torch.float64)
    return Paged(cache, table, states), values


def random_case(
    rng, name: str = "auto", dim: int = 64, turned: int = 16, heads: int = 4, rows: int = 7, count: int = 8, k: int = 12,
    longest: int = 40, compressed: bool = True, states: int = 8, ratio: int = 1, padding: int = 0, config: dict | None = None,
    chosen_type=torch.int64, sink: float = 1.0, full: bool = False, position: int = 0,
) -> dict:
    """Rows of requests with contexts of up to `longest`; `full`: every row's window and choice are whole."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    window_record, compressed_record = records(dim, turned, name)
    lengths = [rng.randint(longest if full else 1, longest) for _ in range(min(rows, 3))]
    window, window_values = pages(rng, g, window_record, lengths, states, rng.randrange(3), 16 * rng.randrange(3))
    other = compressed_values = chosen = None
    req = torch.tensor(sorted(rng.randrange(len(lengths)) for _ in range(rows)))
    high = torch.tensor([lengths[r] - 1 if full else rng.randrange(lengths[r]) for r in req.tolist()])
    low = high - torch.tensor([count - 1 if full else rng.choice((-1, 0, count // 2, count - 1, count + 5, 10 * count)) for _ in range(rows)])
    if compressed:
        held = [length // ratio for length in lengths]
        other, compressed_values = pages(rng, g, compressed_record, held, states // ratio, rng.randrange(3), 16 * rng.randrange(3))
        chosen = torch.full((rows, k), -1)
        for t, r in enumerate(req.tolist()):
            some = rng.sample(range(held[r]), min(held[r], k if full else rng.randint(0, k)))
            chosen[t, : len(some)] = torch.tensor(sorted(some), dtype=torch.int64)
            if not full and rng.random() < 0.5:  # holes, and no order
                chosen[t] = chosen[t, torch.randperm(k, generator=g)]
    for t in range(rows - padding, rows):
        req[t], low[t], high[t] = len(lengths), 0, -1
        if compressed:
            chosen[t] = -1
    return {
        "q": (torch.randn(rows, heads, dim, generator=g) * 0.5).bfloat16(), "positions": high.clamp(min=0) + position,
        "freq": 10000 ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned),
        "sink": torch.randn(heads, generator=g) * sink, "scale": dim**-0.5, "window": window, "low": low, "high": high, "count": count,
        "window_record": window_record, "compressed": other, "chosen": None if chosen is None else chosen.to(chosen_type),
        "compressed_record": compressed_record if compressed else None, "req": req,
        "values": (window_values, compressed_values), "config": config or {},
    }


def random_cases(rng) -> dict[str, dict]:
    """Small ones in all: the interpreter is slow."""
    return {
        "tiny": random_case(rng, rows=9),
        "tiny, three tiles": random_case(rng, rows=3, count=133, k=140, longest=300, full=True),
        "tiny, fp8_ds_mla": random_case(rng, "fp8_ds_mla", rows=5),
        "small tiles": random_case(rng, rows=7, count=37, k=45, longest=90, config={"tile": 16}),
        "many tiles, one program": random_case(rng, rows=2, count=90, k=110, longest=200, full=True, config={"splits": 1, "tile": 16}),
        "many tiles, holes": random_case(rng, rows=3, count=90, k=150, longest=200, config={"splits": 1, "tile": 16}),
        "one head, one row": random_case(rng, heads=1, rows=1, full=True),
        "window only": random_case(rng, compressed=False, rows=5, heads=3),
        "window only, split": random_case(rng, compressed=False, rows=3, count=40, longest=90, config={"splits": 3, "tile": 16}),
        "padding": random_case(rng, rows=6, padding=3, heads=8),
        "padding, split": random_case(rng, rows=6, padding=3, heads=8, config={"splits": 2}),
        "split": random_case(rng, rows=5, count=40, k=70, longest=120, heads=16, full=True, config={"splits": 4, "tile": 16}),
        "more splits than tiles": random_case(rng, rows=3, config={"splits": 7}),
        "two blocks of heads": random_case(rng, rows=2, heads=19, config={"heads": 16}),
        "two blocks of heads, split": random_case(rng, rows=2, heads=19, config={"heads": 16, "splits": 2}),
        "ratio 2": random_case(rng, rows=5, ratio=2, states=16, longest=70),
        "int32 choice": random_case(rng, rows=5, chosen_type=torch.int32),
        "large sinks": random_case(rng, rows=5, sink=200.0),
        "far positions": random_case(rng, rows=5, position=1 << 20),
        "the target's": random_case(rng, dim=512, turned=64, heads=64, rows=2, count=70, k=66, longest=150, states=64),
        "the target's, fp8_ds_mla": random_case(rng, "fp8_ds_mla", dim=512, turned=64, heads=5, rows=2, count=20, k=30, longest=50, states=64),
        "the draft's": random_case(rng, dim=512, turned=64, heads=16, rows=2, count=133, longest=200, states=64, compressed=False),
        "no rows": random_case(rng, rows=5) | {"rows": 0},
    }


def arguments(case: dict, device: str = "cpu", dtype=torch.bfloat16) -> list:
    """What `attend` takes, in its order."""
    rows = case.get("rows", len(case["q"]))

    def moved(x):
        if isinstance(x, Paged):  # blocks stay as far apart as they were
            whole = x.cache.as_strided((x.cache.shape[0], x.cache.stride(0)), (x.cache.stride(0), 1)).to(device)
            return Paged(whole.as_strided(x.cache.shape, x.cache.stride()), x.block_table.to(device), x.states)
        return x.to(device) if isinstance(x, torch.Tensor) else x

    cut = {name: case[name][:rows] for name in ("q", "positions", "low", "high", "req")}
    if case["chosen"] is not None:
        cut["chosen"] = case["chosen"][:rows]
    case = case | cut | {"q": cut["q"].to(dtype)}
    return [moved(case[name]) for name in (
        "q", "positions", "freq", "sink", "scale", "window", "low", "high", "count", "window_record",
        "compressed", "chosen", "compressed_record", "req",
    )]


def expected(case: dict) -> torch.Tensor:
    """The reference in float64."""
    return reference.attend(*arguments(case, dtype=torch.float64))


def answer(case: dict, device: str = "cpu") -> torch.Tensor:
    from deepseek_v41_plugin.kernels.attention import triton_attend

    return triton_attend.attend(*arguments(case, device), config=triton_attend.Config(**case["config"]))


def check_close(name: str, got: torch.Tensor, want: torch.Tensor, case: dict) -> None:
    """Within bf16: q, p and o are rounded to 2^-9; a rounding of q moves scores, which are of order 1 to 30 here."""
    assert got.dtype == torch.bfloat16 and got.shape == want.shape, name
    assert bool(got.isfinite().all()), name
    size = want.abs().amax((1, 2), keepdim=True).clamp(min=1e-3) if len(want) else 1
    off = ((got.double().cpu() - want).abs() / size).amax() if len(want) else 0
    assert float(off) < 0.03, f"{name}: off by {float(off)}"


def by_loops(case: dict) -> torch.Tensor:
    """Row by row from the values that were written, in float64."""
    out = torch.zeros(case["q"].shape, dtype=torch.float64)
    window_values, compressed_values = case["values"]
    pairs = len(case["freq"])

    def turn(x, angle):
        x = x.clone()
        tail = torch.view_as_complex(x[..., -2 * pairs :].unflatten(-1, (pairs, 2)).contiguous())
        x[..., -2 * pairs :] = torch.view_as_real(tail * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        return x

    for t, r in enumerate(case["req"].tolist()):
        seen = [p for p in range(max(int(case["low"][t]), 0), int(case["high"][t]) + 1) if p > int(case["high"][t]) - case["count"]]
        chosen = [] if compressed_values is None else [j for j in case["chosen"][t].tolist() if j >= 0]
        if not seen + chosen:
            continue
        kv = [window_values[r, p] for p in seen] + [compressed_values[r, j] for j in chosen]
        kv, angle = torch.stack(kv), case["freq"] * float(case["positions"][t])
        score = turn(case["q"][t].double(), angle) @ kv.T * case["scale"]
        p = torch.softmax(torch.cat((score, case["sink"].double()[:, None]), 1), 1)[:, :-1]
        out[t] = turn(p @ kv, -angle)
    return out


def test_reference_is_a_loops(run_rng):
    for name, case in random_cases(run_rng).items():
        torch.testing.assert_close(expected(case), by_loops(case)[: case.get("rows")], rtol=1e-11, atol=1e-12, msg=lambda text: f"{name}: {text}")


def test_reference_in_bf16_is_near(run_rng):
    """The bound that Triton's form is held to, shown on torch's own."""
    for name, case in random_cases(run_rng).items():
        check_close(name, reference.attend(*arguments(case)), expected(case), case)


def test_padding_rows_are_zero(run_rng):
    case = random_case(run_rng, rows=6, padding=2)
    assert bool((expected(case)[-2:] == 0).all())


@pytest.fixture(scope="module")
def interpreted(run_seed, tmp_path_factory):
    """(cases, Triton's answers): one process with the interpreter answers all."""
    rng, folder = random.Random(f"{run_seed} attention"), tmp_path_factory.mktemp("attention")
    cases = random_cases(rng)
    return cases, answers_of(__file__, cases, folder)


def test_triton_is_near(interpreted):
    cases, (answers, *_) = interpreted
    assert set(cases) == set(answers)
    for name, case in cases.items():
        check_close(name, answers[name], expected(case), case)


def test_rows_are_their_own_in_the_invariant_mode(interpreted):
    """Bit for bit: alone, and among others."""
    _, (_, together, apart, _) = interpreted
    assert torch.equal(together, torch.cat(apart))


def test_other_types_take_the_reference(interpreted):
    cases, (*_, wide) = interpreted
    assert torch.equal(wide, expected(cases["tiny"]))


def test_triton_compiles_for_hopper(tmp_path):
    """The interpreter takes types as they come; the compiler does not."""
    run([__file__], TRITON_CACHE_DIR=str(tmp_path))


def compiled() -> None:
    """Small instances of both kernels, each branch in one of them, as code for SM90."""
    from deepseek_v41_plugin.kernels.attention import triton_attend

    pointers = {
        "q": "bf16", "o": "bf16", "freq": "fp64", "sink": "fp32", "part": "fp32", "peaks": "fp32", "totals": "fp32", "window": "u8", "compressed": "u8",
        "w_table": "i32", "c_table": "i32", "positions": "i64", "low": "i64", "high": "i64", "chosen": "i64", "req": "i64",
    }
    types = {name: "*" + kind for name, kind in pointers.items()} | {"scale": "fp32"}

    def build(kernel, values: dict) -> None:
        compile_for_hopper(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, values, num_warps=4)

    sizes = {"W_STATES": 8, "C_STATES": 8, "D": 64, "ROPE": 16, "HEADS": 16, "TILE": 16, "WIDTH": 16}
    build(triton_attend._attend, sizes | {"W_KIND": 0, "C_KIND": 1, "W_ALIGN": 2, "C_ALIGN": 4, "SPLIT": True})
    whole = {"SPLIT": False, "part": None, "peaks": None, "totals": None}
    build(triton_attend._attend, sizes | whole | {"W_KIND": 2, "C_KIND": -1, "W_ALIGN": 8, "C_ALIGN": 8})
    build(triton_attend._combine, {"D": 64, "ROPE": 16, "HEADS": 8, "SPLITS": 2})


def test_cpu_takes_the_plain_form_and_says_why(monkeypatch):
    assert attention.attend.choose(CPU).name == "torch"
    assert [row for row in attention.attend.explain(CPU) if row[0] == "triton"] == [("triton", False, "Triton needs a GPU; its interpreter on the CPU is for tests")]
    monkeypatch.setenv("DSV41_OP_ATTEND", "triton")
    with pytest.raises(OpError, match="DSV41_OP_ATTEND=triton: Triton needs a GPU"):
        attention.attend.choose(CPU)


def main(cases_file: str, answers_file: str) -> None:
    """Every new tensor is full of poison, so that what no kernel writes is seen."""
    from deepseek_v41_plugin.kernels.attention import triton_attend

    cases, empty = torch.load(cases_file, weights_only=False), torch.empty
    torch.empty = lambda *shape, **options: empty(*shape, **options).fill_(POISON)
    answers = {name: answer(case) for name, case in cases.items()}
    row_wise = {"q", "positions", "low", "high", "req", "chosen"}
    case = cases["small tiles"]
    with invariant.switched(True):
        together = answer(case)
        alone = [case | {name: case[name][t : t + 1] for name in row_wise} for t in range(len(case["q"]))]
        apart = [answer(one) for one in alone]
    wide = triton_attend.attend(*arguments(cases["tiny"], dtype=torch.float64))
    torch.save((answers, together, apart, wide), answers_file)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else compiled()
