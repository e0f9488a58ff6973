# SPDX-License-Identifier: Apache-2.0
"""Triton's experts against torch's: the grouping, each weight byte, whole calls, what goes to the plain form.

Run as a program, with Triton's interpreter, this file answers the cases of one file into another.
"""

import random
import sys

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, moe
from deepseek_v41_plugin.kernels.formats.blocks import mxfp4_rows
from deepseek_v41_plugin.kernels.formats.rowfp8 import RowFp8, row_quantize
from deepseek_v41_plugin.kernels.moe import reference, spread_ok
from deepseek_v41_plugin.kernels.registry import OpError
from tests.interpreted import answers_of

CPU = torch.device("cpu")
POISON = 0x7F  # NaN as E4M3, 3e38 as bf16 and float32, far out as an index
# table, whole_rows, tile_f, tile_d, block_n, warps, stages
CONFIGS = {
    "decode": (False, False, 64, 128, 16, 4, 4),
    "decode, wider tiles": (False, False, 64, 128, 32, 4, 4),
    "prefill": (True, True, 128, 256, 128, 8, 3),
    "prefill, tiles of 64": (True, True, 128, 256, 64, 8, 3),
    "prefill, scales far apart": (False, True, 128, 256, 64, 8, 3),
    "narrow tiles, in the values": (True, True, 64, 128, 16, 4, 4),
    "one scale a wide tile": (False, False, 128, 128, 16, 8, 3),
}


def generator(rng) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 30))


def packed(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=g, dtype=torch.int32).to(torch.uint8)


def scales(g: torch.Generator, *shape: int, low: int = 112, spread: int = 11) -> torch.Tensor:
    """E8M0 bytes from `low` to `low` + `spread`."""
    return (low + torch.randint(0, spread + 1, shape, generator=g)).to(torch.uint8)


def random_case(
    rng, rows: int, hidden: int, inner: int, k: int, experts: int, of: int = 0, first: int = 0, low: int = 112, spread: int = 11, size: float = 1.0,
    beside: bool = False,
) -> dict:
    """A call; the `experts` held are first .. first + experts - 1 of `of`.  Products reach both sides of the clamp."""
    g = generator(rng)
    ids = torch.stack([torch.randperm(of or experts, generator=g)[:k] for _ in range(rows)]) if rows else torch.zeros(0, k, dtype=torch.int64)
    x = (torch.randn(rows, hidden, generator=g) * size * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=g))).bfloat16()
    return {
        "x": x, "ids": ids, "weights": torch.rand(rows, k, generator=g) + 0.01,
        "w13": packed(g, experts, 2 * inner, hidden // 2), "w13_scale": scales(g, experts, 2 * inner, hidden // 32, low=low, spread=spread),
        "w2": packed(g, experts, hidden, inner // 2), "w2_scale": scales(g, experts, hidden, inner // 32, low=low, spread=spread),
        "limit": 10.0, "first_expert": first,
        # Of the size of what the experts give.
        "beside": (torch.randn(rows, hidden, generator=g) * 16 * size).bfloat16() if beside else None,
    }


def random_cases(rng) -> dict[str, tuple[dict, str]]:
    """Name -> (call, config)."""
    return {
        "one row": (random_case(rng, 1, 128, 128, 3, 6), "decode"),
        "a step": (random_case(rng, 7, 256, 128, 3, 5, of=9, first=2), "decode"),
        "many rows of one expert": (random_case(rng, 37, 128, 128, 1, 1), "decode"),
        "beside": (random_case(rng, 6, 1152, 128, 2, 3, beside=True), "decode"),
        "beside, all elsewhere": (random_case(rng, 3, 128, 128, 2, 2, of=6, first=20, beside=True), "decode"),
        "tiles of 32": (random_case(rng, 21, 128, 256, 2, 3), "decode, wider tiles"),
        "tiles of 64": (random_case(rng, 33, 128, 256, 2, 3, of=5, first=1), "prefill, tiles of 64"),
        "tiles of 128": (random_case(rng, 70, 256, 128, 2, 2, of=3, first=1), "prefill"),
        "rows apart": (random_case(rng, 21, 128, 128, 2, 2), "prefill, tiles of 64"),
        "any spread": (random_case(rng, 9, 256, 128, 2, 3, low=90, spread=40), "decode"),
        "any spread, tiles of 64": (random_case(rng, 9, 128, 128, 2, 3, low=90, spread=40), "prefill, scales far apart"),
        "in the values": (random_case(rng, 9, 128, 256, 2, 3), "narrow tiles, in the values"),
        "a wide tile": (random_case(rng, 9, 128, 256, 2, 3), "one scale a wide tile"),
        "small numbers": (random_case(rng, 5, 128, 128, 2, 3, size=2.0**-12), "decode"),
        "all elsewhere": (random_case(rng, 5, 128, 128, 2, 2, of=6, first=20), "decode"),
        "no rows": (random_case(rng, 0, 128, 128, 2, 3), "decode"),
    }


def expected(case: dict, device: str = "cpu") -> torch.Tensor:
    return reference.experts(**on(case, device))


def on(case: dict, device: str) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in case.items()}


def answer(case: dict, config: str | None, device: str = "cpu", **more) -> torch.Tensor:
    from deepseek_v41_plugin.kernels.moe import triton_experts

    return triton_experts.experts(**on(case, device), config=config and triton_experts.Config(*CONFIGS[config]), **more)


def check_close(name: str, got: torch.Tensor, want: torch.Tensor, bound: float = 2.0**-8) -> None:
    """Rows are off by `bound` of their norm; few by up to 16 times that.

    A sum in another order moves a bf16 by its last bit now and then, and that rarely an FP8 number behind it, by up to
    an eighth: of a row of hundreds of numbers that is below 2^-4.
    """
    assert got.dtype == want.dtype and got.shape == want.shape, name
    got, want = got.float(), want.float()
    assert bool(torch.isfinite(want).all())
    off = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    if len(off):
        assert float(off.median()) <= bound and float(off.max()) <= 16 * bound, f"{name}: rows off by {off.tolist()}"


# Which pairs lie in which tile.


def random_groupings(rng) -> list[dict]:
    """ids [rows, k] over experts 0 .. of - 1, of which `experts` from `first` on are held."""
    shapes = [(1, 6, 8, 8, 0), (30, 6, 40, 384, 7), (70, 3, 5, 7, 2), (200, 1, 3, 3, 0), (9, 2, 4, 50, 46), (5, 3, 130, 130, 0)]
    cases = []
    for rows, k, experts, of, first in shapes:
        ids = torch.stack([torch.randperm(of, generator=generator(rng))[:k] for _ in range(rows)])
        cases.append({"ids": ids, "first": first, "experts": experts, "block_n": rng.choice((16, 32, 64))})
    return cases


def grouped_by_a_loop(ids: torch.Tensor, first: int, experts: int, block_n: int) -> tuple[list[int], list[int]]:
    flat, expert, pair = ids.flatten().tolist(), [], []
    for e in range(experts):
        mine = [p for p, chosen in enumerate(flat) if chosen - first == e]
        while mine:
            expert.append(e)
            pair += (mine[:block_n] + [-1] * block_n)[:block_n]
            mine = mine[block_n:]
    return expert, pair


def group(case: dict, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    from deepseek_v41_plugin.kernels.moe.triton_group import prepare

    ids = case["ids"].to(device)
    groups, _ = prepare(torch.ones(len(ids), 128, dtype=torch.bfloat16, device=device), ids, case["first"], case["experts"], case["block_n"])
    return groups.expert.cpu(), groups.pair.cpu()


def check_groups(case: dict, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    expert, pair = grouped_by_a_loop(**case)
    assert len(got[0]) == min(case["ids"].numel(), case["experts"]) + case["ids"].numel() // case["block_n"] >= len(expert)
    assert got[0].tolist() == expert + [-1] * (len(got[0]) - len(expert))
    assert got[1][: len(pair)].tolist() == pair


# Rows before the products.


def apart(x: torch.Tensor) -> torch.Tensor:
    """Of each 32 columns the even ones, then the odd ones."""
    return x.unflatten(-1, (-1, 16, 2)).transpose(-1, -2).flatten(-3)


def random_rows(rng) -> list[torch.Tensor]:
    """Numbers of all sizes; rows whose largest lies just beside a power of two times 448; zeros."""
    g = generator(rng)
    x = torch.randn(8, 256, generator=g) * torch.exp2(torch.randint(-20, 12, (8, 256), generator=g))
    x[1] = 0
    x[2, :3] = torch.tensor([448.0, -1.0, 2.0**-9]) * 2.0**5
    x[2, 3:] = 0
    x[3] = x[3].clamp(-1, 1)
    x[3, 7] = 1.75 * 2.0 + 2.0**-6
    return [x.bfloat16(), x[:, :128].bfloat16()]


def rows_before(x: torch.Tensor, device: str = "cpu", fp8: RowFp8 | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    from deepseek_v41_plugin.kernels.moe.triton_group import prepare

    x = x.to(device)
    _, q = prepare(x, torch.zeros(len(x), 1, dtype=torch.int64, device=device), 0, 1, 16, fp8)
    return q.q.view(torch.uint8).cpu(), q.scale.cpu()


def check_rows(x: torch.Tensor, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    want = row_quantize(x)
    assert torch.equal(got[0], apart(want.q.view(torch.uint8))) and torch.equal(got[1], want.scale)


# Weights, byte by byte: unit rows pick their columns out.


def weight_cases(rng) -> list[dict]:
    """w2 [1, 256, 64]: each byte in a block of 32 columns 0 to 11 octaves below its row's largest; then any spread."""
    cases = []
    for most in (11, 100):
        row, block = torch.arange(256)[:, None], torch.arange(4)
        spread = row % 12 if most == 11 else torch.full_like(row, most)
        # Block 1 lies `spread` below block 0; 16 rows of one spread hold 256 bytes there.
        below = (torch.rand(256, 4, generator=generator(rng)) * (spread + 1)).int().clamp(max=spread)
        below[:, 0], below[:, 1] = 0, spread[:, 0]
        scale = rng.choice((121, 140, 200)) - below
        bytes_ = 16 * (row // 12)[..., None] + 64 * block[:, None] + torch.arange(16) + rng.randrange(256)
        cases.append({"w2": (bytes_ % 256).to(torch.uint8).reshape(1, 256, 64), "w2_scale": scale.to(torch.uint8)[None], "spread": most})
    return cases


def decoded(case: dict, config: str, device: str = "cpu") -> torch.Tensor:
    """bf16 [128 columns, 256 rows]: what the second product makes of unit rows."""
    from deepseek_v41_plugin.kernels.moe import triton_experts

    c = triton_experts.Config(*CONFIGS[config])
    tiles = 128 // c.block_n
    groups = triton_experts.Groups(
        torch.zeros(tiles, dtype=torch.int32, device=device), torch.arange(128, dtype=torch.int32, device=device), c.block_n,
    )
    scale = torch.ones(128 if c.whole_rows else 128 * (128 // c.tile_f), device=device)
    h = RowFp8(apart(torch.eye(128)).to(torch.float8_e4m3fn).to(device), scale)
    return triton_experts._second(h, groups, case["w2"].to(device), case["w2_scale"].to(device), 128, c).cpu()


def check_decoded(case: dict, got: torch.Tensor) -> None:
    assert torch.equal(got, mxfp4_rows(case["w2"][0], case["w2_scale"][0], torch.bfloat16).T)


WEIGHT_CONFIGS = {"decode": 100, "prefill": 11, "prefill, tiles of 64": 11, "narrow tiles, in the values": 11, "prefill, scales far apart": 100}  # and the spread they hold


# A row's bits.


def alone_and_together(rng) -> dict:
    """Rows of which those of the first call are few, of the second many more, so that its tiles are others.

    Small whole numbers: float32 holds their sums, in whichever order the interpreter's library takes them.
    """
    case = random_case(rng, 41, 256, 128, 2, 3, of=4, low=121, spread=1)
    return case | {"x": torch.randint(-3, 4, (41, 256), generator=generator(rng)).bfloat16()}


def part(case: dict, rows: torch.Tensor) -> dict:
    return case | {name: case[name][rows] for name in ("x", "ids", "weights")}


def bits_of_rows(case: dict, device: str = "cpu") -> list[torch.Tensor]:
    """Rows 3 and 40: alone, with all, in wider tiles, with x already rounded."""
    rows, fp8 = torch.tensor([3, 40]), row_quantize(case["x"].to(device))
    return [
        answer(part(case, rows), "decode", device), answer(case, "decode", device)[rows.to(device)],
        answer(case, "decode, wider tiles", device)[rows.to(device)], answer(case, "decode", device, fp8=fp8)[rows.to(device)],
    ]


def bits_of_many(case: dict, device: str = "cpu") -> list[torch.Tensor]:
    """The same of the other order of sums."""
    rows = torch.tensor([3, 40])
    return [answer(part(case, rows), "prefill", device), answer(case, "prefill", device)[rows.to(device)], answer(case, "prefill, tiles of 64", device)[rows.to(device)]]


@pytest.fixture(scope="module")
def interpreted(run_seed, tmp_path_factory):
    """(inputs, Triton's answers): one process with the interpreter answers all."""
    rng, folder = random.Random(f"{run_seed} experts"), tmp_path_factory.mktemp("experts")
    inputs = {
        "calls": random_cases(rng), "groups": random_groupings(rng), "rows": random_rows(rng), "weights": weight_cases(rng), "bits": alone_and_together(rng),
        "plain": random_case(rng, 3, 128, 128, 2, 3), "odd": random_case(rng, 3, 96, 64, 2, 3),
    }
    return inputs, answers_of(__file__, inputs, folder)


def test_calls_are_torchs(interpreted):
    inputs, answers = interpreted
    for name, (case, _) in inputs["calls"].items():
        check_close(name, answers["calls"][name], expected(case))


def test_pairs_lie_in_tiles_as_a_loop_puts_them(interpreted):
    inputs, answers = interpreted
    for case, got in zip(inputs["groups"], answers["groups"], strict=True):
        check_groups(case, got)


def test_rows_are_rounded_as_torch_does(interpreted):
    inputs, answers = interpreted
    for x, got, given in zip(inputs["rows"], answers["rows"], answers["given rows"], strict=True):
        check_rows(x, got)
        check_rows(x, given)


@pytest.mark.parametrize("config", WEIGHT_CONFIGS)
def test_weights_are_decoded_exactly(interpreted, config):
    inputs, answers = interpreted
    for case, got in zip(inputs["weights"], answers["weights"][config], strict=True):
        if case["spread"] <= WEIGHT_CONFIGS[config]:
            check_decoded(case, got)
        else:
            with pytest.raises(AssertionError):
                check_decoded(case, got)


def test_a_row_has_the_same_bits_in_any_company(interpreted):
    _, answers = interpreted
    for some in (answers["bits"], answers["bits of many"]):
        assert bool(some[0].any())
        for other in some[1:]:
            assert torch.equal(some[0], other)


def test_which_calls_are_the_plain_forms(interpreted):
    """Other types, no rounding, odd widths: to the last bit."""
    inputs, answers = interpreted
    x = inputs["plain"]
    for got, want in zip(answers["plain"], (x | {"quantize": False}, x | {"x": x["x"].double()}, x | {"x": x["x"].float()}, inputs["odd"]), strict=True):
        assert torch.equal(got, reference.experts(**want))
    assert not torch.equal(answers["plain"][0], answers["not plain"])


def test_the_configs_in_use(interpreted):
    """Decode steps and the invariant mode take scales of any spread, and one order of sums."""
    _, answers = interpreted
    decode, wide, many, far, invariant_many = answers["configs"]
    assert not decode.table and not decode.whole_rows and decode._replace(block_n=wide.block_n) == wide == wide._replace(block_n=32)
    assert many.table and many.whole_rows and far == many._replace(table=False, block_n=64)
    assert invariant_many._replace(block_n=16) == decode


def test_spread(run_rng):
    g = generator(run_rng)
    assert spread_ok(scales(g, 3, 8, 8))
    bad = scales(g, 3, 8, 8, low=100, spread=11)
    bad[1, 5, 4:8] = torch.tensor([100, 104, 112, 108])
    assert not spread_ok(bad)
    bad[1, 5, 6] = 111
    assert spread_ok(bad)
    bad[2, 0, 0:4], bad[2, 0, 4:8] = 20, 220  # other units
    assert spread_ok(bad)
    for byte in (0, 255):
        bad[0, 0, 0:4] = byte
        assert not spread_ok(bad)
    assert not spread_ok(scales(g, 1, 2, 6))


def test_cpu_takes_the_plain_form_and_says_why(monkeypatch):
    assert moe.experts.choose(CPU).name == "torch" and not moe.experts.choose(CPU).graphs
    monkeypatch.setenv("DSV41_OP_MOE_EXPERTS", "triton")
    with pytest.raises(OpError, match="DSV41_OP_MOE_EXPERTS=triton: Triton needs a GPU"):
        moe.experts.choose(CPU)


def test_the_plain_form_looks_at_neither_hint(run_rng):
    case = random_case(run_rng, 3, 64, 32, 2, 3)
    want, x = reference.experts(**case), case.pop("x")
    assert torch.equal(moe.experts(x, **case, fp8=RowFp8(x, x), narrow=True), want)


def main(inputs_file: str, answers_file: str) -> None:
    """Every new tensor is full of poison, so that what no kernel writes is seen."""
    from deepseek_v41_plugin.kernels.moe import triton_experts

    empty = torch.empty

    def poisoned(*shape, **options):
        new = empty(*shape, **options)
        new.view(torch.uint8).fill_(POISON)
        return new

    torch.empty = poisoned
    inputs = torch.load(inputs_file, weights_only=False)
    plain = inputs["plain"]
    with invariant.switched(True):
        same = triton_experts.choose(4096, 6, 384, True)
    calls, most = {}, triton_experts.MOST_ROWS
    for name, (case, config) in inputs["calls"].items():
        triton_experts.MOST_ROWS = 8 if name == "rows apart" else most
        calls[name] = answer(case, config)
    triton_experts.MOST_ROWS = most
    answers = {
        "calls": calls,
        "groups": [group(case) for case in inputs["groups"]],
        "rows": [rows_before(x) for x in inputs["rows"]],
        "given rows": [rows_before(x, fp8=row_quantize(x)) for x in inputs["rows"]],
        "weights": {config: [decoded(case, config) for case in inputs["weights"]] for config in WEIGHT_CONFIGS},
        "bits": bits_of_rows(inputs["bits"]), "bits of many": bits_of_many(inputs["bits"]),
        "plain": [answer(case, None, **more) for case, more in (
            (plain, {"quantize": False}), (plain | {"x": plain["x"].double()}, {}), (plain | {"x": plain["x"].float()}, {}), (inputs["odd"], {}),
        )],
        "not plain": answer(plain, None),
        "configs": [triton_experts.choose(*call) for call in ((64, 6, 384, True), (1024, 6, 384, False), (4096, 6, 384, True), (4096, 6, 384, False))] + [same],
    }
    torch.save(answers, answers_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
