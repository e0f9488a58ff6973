# SPDX-License-Identifier: Apache-2.0
"""Dense Linears: row weights against the blocks they come from, and Triton's forms against torch's.

Run as a program, with Triton's interpreter, this file answers the cases of one file into another.
"""

import ctypes
import mmap
import random
import sys

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, linear
from deepseek_v41_plugin.kernels.formats.blocks import dense_weight, round_fp8
from deepseek_v41_plugin.kernels.formats.rowfp8 import RowFp8, row_quantize
from deepseek_v41_plugin.kernels.linear import pack_group, reference
from deepseek_v41_plugin.kernels.linear.group_weight import unpack_group
from deepseek_v41_plugin.kernels.linear.row_weight import RowWeight
from deepseek_v41_plugin.kernels.registry import OPS
from tests.interpreted import answers_of

CPU = torch.device("cpu")
EPS = 1e-20


def generator(rng) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 30))


def spread(g: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """bf16 [rows, columns] over many powers of two; one row in four is small, one value in eight is zero."""
    x = torch.randn(rows, columns, generator=g) * torch.exp2(torch.randint(-20, 3, (rows, columns), generator=g).float())
    x *= torch.where(torch.rand(rows, 1, generator=g) < 0.25, 2.0**-12, 1.0)
    return torch.where(torch.rand(rows, columns, generator=g) < 0.125, 0.0, x).bfloat16()


def fp8_values(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Finite E4M3 of any exponent."""
    byte = torch.randint(0, 127, shape, generator=g, dtype=torch.uint8)
    return (byte | (torch.randint(0, 2, shape, generator=g, dtype=torch.uint8) << 7)).view(torch.float8_e4m3fn)


def random_row_weight(g: torch.Generator, outputs: int, depth: int) -> RowWeight:
    return RowWeight(fp8_values(g, outputs, depth), torch.exp2(torch.randint(-12, 4, (outputs,), generator=g).float()))


def same_rows(got: RowFp8, want: RowFp8) -> bool:
    return torch.equal(got.q.view(torch.uint8), want.q.view(torch.uint8)) and torch.equal(got.scale, want.scale)


# ---- the plain forms


@pytest.mark.parametrize("rows", [1, 5])
def test_row_linear_is_the_product_of_the_values(run_rng, rows):
    g = generator(run_rng)
    x, w = row_quantize(spread(g, rows, 96)), random_row_weight(g, 40, 96)
    want = x.values(torch.float64) @ w.values(torch.float64).T
    size = x.values(torch.float64).abs() @ w.values(torch.float64).abs().T
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):
        got = linear.row_linear(x, w, dtype)
        assert got.dtype == dtype and bool(((got.double() - want).abs() <= bound * size).all())


def test_norm_and_swiglu_round_before_they_quantise(run_rng):
    g = generator(run_rng)
    x, weight, gate_up = spread(g, 6, 64), torch.randn(64, generator=g).bfloat16(), 8 * torch.randn(6, 128, generator=g).bfloat16()
    y, rows = linear.norm_rows(x, weight, EPS)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=0)
    assert y.dtype == torch.bfloat16 and same_rows(rows, row_quantize(y))
    none, rows = linear.norm_rows(x, weight, EPS, value=False)
    assert none is None and same_rows(rows, row_quantize(y))

    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=10), up.clamp(-10, 10)
    want = (gate / (1 + (-gate).exp()) * up).bfloat16()
    got, want = linear.swiglu_rows(gate_up, 10.0).values(torch.float64), row_quantize(want).values(torch.float64)
    # Beside the rounding to bf16 of float32's value, an E4M3 step of the row's largest.
    assert bool(((got - want).abs() <= 2.0**-3 * want.abs() + 2.0**-17 * want.abs().amax(-1, keepdim=True)).all())
    assert float((got != want).double().mean()) < 0.02


def test_rows_are_the_blocks_values_but_for_the_smallest(run_rng):
    """Equal where E4M3 is normal under the row's scale, that is from 2^-13.8 of the row's largest; below, half a step of each."""
    x = spread(generator(run_rng), 20, 96)
    rows = row_quantize(x)
    difference = (rows.values(torch.float64) - round_fp8(x.double())).abs()
    scale = rows.scale.double()[:, None]
    small = x.double().abs() < 2.0**-6 * scale
    assert bool((difference[~small] == 0).all()) and bool((difference <= 1.5 * 2.0**-10 * scale).all())
    largest = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    assert bool((largest / scale > 224).all()) and bool((largest / scale <= 448).all())


def test_wide_linear_keeps_the_sum(run_rng):
    g = generator(run_rng)
    x, w = torch.randn(7, 80, generator=g).bfloat16(), torch.randn(13, 80, generator=g).bfloat16()
    got = linear.wide_linear(x, w)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ w.double().T, rtol=0, atol=1e-4)
    assert linear.wide_linear(x.double(), w).dtype == torch.float64


@pytest.mark.parametrize("in_place", [False, True])
def test_packed_groups_are_the_same_bytes(run_rng, in_place):
    """Word j of 128 columns holds columns j, 32 + j, 64 + j and 96 + j, the first in its lowest byte."""
    weight = fp8_values(generator(run_rng), 96, 384)
    before = weight.view(torch.uint8).clone()
    words = pack_group(weight, in_place)
    assert words.dtype == torch.int32 and words.shape == (96, 96) and (words.data_ptr() == weight.data_ptr()) == in_place
    r, j, block = run_rng.randrange(96), run_rng.randrange(32), run_rng.randrange(3)
    word = int(words[r, 32 * block + j]) & 0xFFFFFFFF
    assert [word >> 8 * p & 0xFF for p in range(4)] == [int(before[r, 128 * block + 32 * p + j]) for p in range(4)]
    assert torch.equal(unpack_group(words).view(torch.uint8), before)
    assert pack_group(weight[:, :96].contiguous()) is None and pack_group(weight[:40]) is None


def test_group_linear_is_each_groups_product(run_rng):
    g = generator(run_rng)
    o, weight = torch.randn(5, 3, 128, generator=g), fp8_values(g, 3 * 64, 128)
    scale = torch.randint(110, 130, (6, 4), generator=g).to(torch.uint8)
    w = dense_weight(weight, scale, torch.float64)
    want = torch.stack([o[:, i].double() @ w[64 * i : 64 * i + 64].T for i in range(3)], 1)
    for form in (weight, pack_group(weight)):
        torch.testing.assert_close(linear.group_linear(o.double(), form, scale), want, rtol=1e-12, atol=1e-12 * float(want.abs().max()))
        got = linear.group_linear(o.bfloat16(), form, scale)
        assert got.dtype == torch.bfloat16 and got.shape == (5, 3, 64)


def test_cpu_takes_the_plain_forms_and_says_why():
    for op in (linear.quantize_rows, linear.norm_rows, linear.swiglu_rows, linear.group_linear, linear.wide_linear, OPS["row_linear"]):
        assert op.choose(CPU).name == "torch"
        assert op.explain(CPU)[0] == ("triton", False, "Triton needs a GPU; its interpreter on the CPU is for tests")


# ---- Triton's forms, interpreted


def row_cases(rng) -> dict[str, dict]:
    """What the row kernels take; strided rows as the parts of a fused product are."""
    g = generator(rng)
    cases = {}
    for rows, columns in ((1, 1280), (5, 5120), (7, 288), (3, 100), (17, 16), (2, rng.randrange(17, 3000)), (0, 64)):
        wide = spread(g, rows, columns + 32)
        cases[f"{rows} x {columns}"] = {
            "x": wide[:, 16 : 16 + columns], "weight": torch.randn(columns, generator=g).bfloat16(),
            "gate_up": 6 * torch.randn(rows, 2 * columns, generator=g).bfloat16(), "limit": rng.choice((10.0, 3.5)),
        }
    ties = fp8_values(g, 4, 64).float() * (1 + 2.0**-4)  # half way between two E4M3, where that is normal
    cases["ties"] = cases["1 x 1280"] | {"x": torch.cat((ties, torch.full((4, 1), 448.0)), 1).bfloat16(), "weight": torch.ones(65).bfloat16()}
    zeros = torch.zeros(3, 48).bfloat16()
    cases["zeros"] = cases["1 x 1280"] | {"x": zeros, "weight": torch.ones(48).bfloat16(), "gate_up": zeros}
    cases["float32"] = cases["1 x 1280"] | {"x": torch.randn(4, 1280, generator=g)}
    return cases


def product_cases(rng) -> dict[str, dict]:
    """Rows, outputs and depth odd; one and several splits; one and several tiles of either."""
    g = generator(rng)
    cases = {}
    for rows, outputs, depth in ((1, 64, 640), (3, 100, 288), (17, 70, 1280), (40, 136, 512), (70, 5, 400), (129, 67, 272), (0, 64, 128)):
        cases[f"{rows} x {outputs} x {depth}"] = {
            "x": row_quantize(spread(g, rows, depth)), "weight": random_row_weight(g, outputs, depth),
            "wide_x": torch.randn(rows, depth + 16, generator=g).bfloat16()[:, :depth], "wide_weight": torch.randn(outputs, depth, generator=g).bfloat16(),
        }
    return cases


def group_cases(rng) -> dict[str, dict]:
    """All E4M3 values and scales from 2^-127; one split and several, one tile of rows and several."""
    g = generator(rng)
    cases = {}
    for rows, groups, outputs, depth in ((1, 1, 256, 384), (3, 2, 128, 640), (18, 3, 128, 128), (70, 1, 128, 256), (0, 2, 128, 128)):
        scale = torch.randint(100, 128, (groups * outputs // 32, depth // 32), generator=g)
        scale[torch.rand(scale.shape, generator=g) < 0.1] = rng.choice((0, 20, 140))
        cases[f"{rows} x {groups} x {outputs} x {depth}"] = {
            "o": torch.randn(rows, groups * depth + 64, generator=g).bfloat16()[:, : groups * depth].unflatten(1, (groups, -1)),
            "weight": fp8_values(g, groups * outputs, depth), "scale": scale.to(torch.uint8),
        }
    return cases


def answer_groups(case: dict, device: str = "cpu"):
    """(each configuration's result, the weight in bf16)."""
    from deepseek_v41_plugin.kernels.linear import triton_group

    o, words, scale = case["o"].to(device), pack_group(case["weight"].to(device)), case["scale"].to(device)
    words = guarded(words) if device == "cpu" else words
    return [triton_group.group_product(o, words, scale, config) for config in triton_group.CONFIGS.values()], triton_group.dequantized(words, scale)


def check_groups(name: str, case: dict, answer, bound: float = 4e-6) -> None:
    """The sum within `bound` of its terms' sizes, then rounded to bf16; the weight to the bit, but for scales of 2^-127, which are 0."""
    outs, dense = answer
    scale = case["scale"]
    w = dense_weight(case["weight"], scale, torch.float64)
    zero = (scale == 0).repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(dense.cpu().double(), torch.where(zero, 0, w)), name
    w = w.unflatten(0, (case["o"].shape[1], -1))
    o = case["o"].double()
    want, size = torch.einsum("tgi,gri->tgr", o, w), torch.einsum("tgi,gri->tgr", o.abs(), w.abs())
    assert outs[0].dtype == torch.bfloat16 and outs[0].shape == want.shape, name
    assert bool(((outs[0].cpu().double() - want).abs() <= 2.0**-8 * want.abs() + bound * size).all()), name
    assert all(torch.equal(out, outs[0]) for out in outs), name


def answer_rows(case: dict, device: str = "cpu"):
    from deepseek_v41_plugin.kernels.linear import triton_rows

    x, weight, gate_up = (case[name].to(device) for name in ("x", "weight", "gate_up"))
    return triton_rows.quantize_rows(x), triton_rows.norm_rows(x, weight, EPS), triton_rows.norm_rows(x, weight, EPS, value=False), triton_rows.swiglu_rows(gate_up, case["limit"])


def check_rows(name: str, case: dict, answer, device: str = "cpu") -> None:
    x, weight, gate_up = (case[name].to(device) for name in ("x", "weight", "gate_up"))
    quantized, (y, normed), (none, again), gated = answer
    assert same_rows(quantized, reference.quantize_rows(x)), name
    torch.testing.assert_close(y, reference.norm_rows(x, weight, EPS)[0], rtol=2.0**-7, atol=0, msg=lambda text: f"{name}: {text}")
    assert none is None and same_rows(normed, row_quantize(y)) and same_rows(again, normed), name
    want = reference.swiglu_rows(gate_up, case["limit"]).values(torch.float64)
    got = gated.values(torch.float64)
    step = 2.0**-3 * want.abs() + 2.0**-17 * want.abs().amax(-1, keepdim=True)
    assert got.shape == want.shape and bool(((got - want).abs() <= step).all()), name
    assert not got.numel() or float((got != want).double().mean()) < 0.02, name


def configurations():
    from deepseek_v41_plugin.kernels.linear.triton_skinny import CONFIGS

    return [None, CONFIGS[16], CONFIGS[64]]


def answer_products(case: dict, device: str = "cpu"):
    """(FP8 in float32 of each configuration, in bf16; the same of bf16 weights)."""
    from deepseek_v41_plugin.kernels.linear import triton_skinny

    x, weight = RowFp8(*(part.to(device) for part in case["x"])), RowWeight(*(part.to(device) for part in case["weight"]))
    wide_x, wide_weight = case["wide_x"].to(device), case["wide_weight"].to(device)
    rows = [triton_skinny.row_product(x, weight, torch.float32, config) for config in configurations()]
    return rows, triton_skinny.row_product(x, weight, torch.bfloat16), [triton_skinny.wide_product(wide_x, wide_weight, config) for config in configurations()]


def check_products(name: str, case: dict, answer, exact: bool = True) -> None:
    """Within float32's roundings of the sum (or, not `exact`, within the FP8 tensor cores' own), and equal in all configurations."""
    rows, rounded, wide = answer
    x, w = case["x"].values(torch.float64), case["weight"].values(torch.float64)
    bound, wide_bound = (2e-6, 2e-6) if exact else (2.0**-11, 3e-5)
    assert rows[0].dtype == torch.float32 and rows[0].shape == (len(x), len(w)), name
    assert bool(((rows[0].cpu().double() - x @ w.T).abs() <= bound * (x.abs() @ w.abs().T)).all()), name
    assert torch.equal(rounded, rows[0].bfloat16()), name
    x, w = case["wide_x"].double(), case["wide_weight"].double()
    assert bool(((wide[0].cpu().double() - x @ w.T).abs() <= wide_bound * (x.abs() @ w.abs().T)).all()), name
    for other in rows[1:]:
        assert torch.equal(other, rows[0]), name
    for other in wide[1:]:
        assert torch.equal(other, wide[0]), name


@pytest.fixture(scope="module")
def interpreted(run_seed, tmp_path_factory):
    """(cases, answers) of one process with the interpreter."""
    rng, folder = random.Random(f"{run_seed} linear"), tmp_path_factory.mktemp("linear")
    cases = {"rows": row_cases(rng), "products": product_cases(rng), "groups": group_cases(rng)}
    return cases, answers_of(__file__, cases, folder)


def test_rows_of_triton(interpreted):
    cases, answers = interpreted
    assert set(cases["rows"]) == set(answers["rows"])
    for name, case in cases["rows"].items():
        check_rows(name, case, answers["rows"][name])


def test_products_of_triton(interpreted):
    cases, answers = interpreted
    assert set(cases["products"]) == set(answers["products"])
    for name, case in cases["products"].items():
        check_products(name, case, answers["products"][name])


def test_groups_of_triton(interpreted):
    cases, answers = interpreted
    assert set(cases["groups"]) == set(answers["groups"])
    for name, case in cases["groups"].items():
        check_groups(name, case, answers["groups"][name])


def test_splits_leave_their_counters_zero(interpreted):
    _, answers = interpreted
    assert len(answers["counters"]) > 3
    assert all(bool((counter == 0).all()) for counter in answers["counters"])


def test_a_row_alone_has_the_bits_it_has_among_others(interpreted):
    cases, answers = interpreted
    for name, (row, rows, wide) in answers["alone"].items():
        assert torch.equal(rows[0], answers["products"][name][0][0][row]), name
        assert torch.equal(wide[0], answers["products"][name][2][0][row]), name
    for name, row in answers["group alone"].items():
        assert torch.equal(row[0], answers["groups"][name][0][0][-1]), name


def test_many_rows_go_in_pieces(interpreted):
    """Launches of 32 rows at most give the bits of one launch."""
    _, answers = interpreted
    for name, (rows, rounded, wide, groups) in answers["pieces"].items():
        want = answers["products"][name]
        assert torch.equal(rows[0], want[0][0]) and torch.equal(rounded, want[1]) and torch.equal(wide[0], want[2][0]), name
    assert torch.equal(groups, answers["groups"]["70 x 1 x 128 x 256"][0][0])


def test_which_kernel_runs(interpreted):
    """By rows, dtype, shape and the invariant mode."""
    assert interpreted[1]["choices"] == {
        "one row": "config 16", "64 rows": "config 64", "128 rows": "config 128", "129 rows": "library", "129 rows in float32": "config 128",
        "129 rows, odd outputs": "config 128", "invariant, one row": "invariant", "invariant, 129 rows": "invariant", "float64": "reference",
        "wide, 64 rows": "config 64", "wide, 65 rows": "library", "wide, invariant, 65 rows": "invariant", "wide, float32": "reference",
        "group, 16 rows": "group config 16", "group, 256 rows": "group config 64", "group, 257 rows": "library", "group, E4M3": "library", "group, 64 outputs": "library",
        "group, float32": "reference", "group, invariant, 300 rows": "invariant", "group, invariant, E4M3": "reference",
    }


def choices() -> dict[str, str]:
    """What `cuda` would run, by name."""
    from deepseek_v41_plugin.kernels.linear import cuda, triton_group
    from deepseek_v41_plugin.kernels.linear.triton_skinny import CONFIGS

    names = {config: f"config {most}" for most, config in CONFIGS.items()}
    kept = cuda.row_product, cuda.wide_product, cuda.group_product, cuda.reference, torch._scaled_mm, torch.mm
    cuda.row_product = lambda x, weight, dtype, config: named(config)
    cuda.wide_product = lambda x, weight, config: named(config)
    group_names = {config: f"group config {most}" for most, config in triton_group.CONFIGS.items()}
    cuda.group_product = lambda o, weight, scale, config: "invariant" if invariant.enabled() and config is triton_group.INVARIANT else group_names[config]
    cuda.reference = type("Plain", (), dict.fromkeys(("row_linear", "wide_linear", "group_linear"), staticmethod(lambda *_: "reference")))
    torch._scaled_mm = torch.mm = lambda *_, **__: "library"

    def named(config):
        return "invariant" if invariant.enabled() and config is cuda.INVARIANT else names[config]

    def row(rows, outputs=32, dtype=torch.bfloat16):
        x = RowFp8(torch.empty(rows, 64, dtype=torch.float8_e4m3fn), torch.empty(rows))
        return cuda.row_linear(x, RowWeight(torch.empty(outputs, 64, dtype=torch.float8_e4m3fn), torch.empty(outputs)), dtype)

    def wide(rows, dtype=torch.bfloat16):
        return cuda.wide_linear(torch.empty(rows, 64, dtype=dtype), torch.empty(32, 64, dtype=dtype))

    def group(rows, outputs=128, dtype=torch.bfloat16, packed=True):
        """The library's product writes; the others are named."""
        weight, scale = torch.zeros(2 * outputs, 128, dtype=torch.float8_e4m3fn), torch.zeros(2 * outputs // 32, 4, dtype=torch.uint8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "dequantized", lambda *_: torch.zeros(2 * outputs, 128, dtype=dtype))
            out = cuda.group_linear(torch.zeros(rows, 2, 128, dtype=dtype), pack_group(weight) if packed else weight, scale)
        return out if isinstance(out, str) else "library"

    try:
        taken = {
            "one row": row(1), "64 rows": row(64), "128 rows": row(128), "129 rows": row(129), "129 rows in float32": row(129, dtype=torch.float32),
            "129 rows, odd outputs": row(129, outputs=33), "float64": row(3, dtype=torch.float64),
            "wide, 64 rows": wide(64), "wide, 65 rows": wide(65), "wide, float32": wide(3, torch.float32),
            "group, 16 rows": group(16), "group, 256 rows": group(256), "group, 257 rows": group(257), "group, E4M3": group(3, packed=False),
            "group, 64 outputs": group(3, outputs=64), "group, float32": group(3, dtype=torch.float32),
        }
        with invariant.switched(True):
            return taken | {
                "invariant, one row": row(1), "invariant, 129 rows": row(129), "wide, invariant, 65 rows": wide(65),
                "group, invariant, 300 rows": group(300), "group, invariant, E4M3": group(3, packed=False),
            }
    finally:
        cuda.row_product, cuda.wide_product, cuda.group_product, cuda.reference, torch._scaled_mm, torch.mm = kept


def pieces(cases: dict) -> dict[str, tuple]:
    """The longest cases in launches of few rows."""
    from deepseek_v41_plugin.kernels.linear import triton_group, triton_skinny

    case = cases["groups"]["70 x 1 x 128 x 256"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_skinny, "MOST_ROWS", 32)
        patch.setattr(triton_group, "MOST_ROWS", 32)
        groups = triton_group.group_product(case["o"], pack_group(case["weight"]), case["scale"], triton_group.CONFIGS[16])
        return {name: (*answer_products(cases["products"][name]), groups) for name in ("40 x 136 x 512", "129 x 67 x 272")}


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is a page's last before one that may not be read: reading past the end kills the process."""
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    if not size:
        return x
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    out = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=pages * page - size).view(x.dtype).view(x.shape)
    return out.copy_(x)


def guard(value):
    """Every tensor of a case guarded; a view of wider rows with the rows it is cut from, so that its last row ends at the guard."""
    if isinstance(value, torch.Tensor):
        if value.is_contiguous() or not value.numel():
            return guarded(value.contiguous())
        flat = guarded(torch.as_strided(value, (value.shape[0] * value.stride(0) - value.stride(0) + value[0].numel(),), (1,)).clone())
        return torch.as_strided(flat, value.shape, value.stride())
    if isinstance(value, tuple):
        return type(value)(*map(guard, value))
    return {name: guard(part) for name, part in value.items()} if isinstance(value, dict) else value


def alone(case: dict, device: str = "cpu") -> tuple:
    """The last row by itself."""
    row = len(case["wide_x"]) - 1
    one = case | {"x": RowFp8(*(part[row:] for part in case["x"])), "wide_x": case["wide_x"][row:]}
    rows, _, wide = answer_products(one, device)
    return row, rows[0], wide[0]


def main(cases_file: str, answers_file: str) -> None:
    """Every new tensor is full of poison, so that what no kernel writes is seen."""
    from deepseek_v41_plugin.kernels.linear import triton_skinny

    cases = guard(torch.load(cases_file, weights_only=False))
    empty = torch.empty
    torch.empty = lambda *shape, **options: poison(empty(*shape, **options))
    answers = {"rows": {name: answer_rows(case) for name, case in cases["rows"].items()}}
    answers["products"] = {name: answer_products(case) for name, case in cases["products"].items()}
    answers["groups"] = {name: answer_groups(case) for name, case in cases["groups"].items()}
    answers["counters"] = list(triton_skinny._counters.values())
    answers["alone"] = {name: alone(case) for name, case in cases["products"].items() if len(case["wide_x"])}
    answers["pieces"] = pieces(cases)
    answers["group alone"] = {name: answer_groups(case | {"o": case["o"][-1:]})[0][0] for name, case in cases["groups"].items() if len(case["o"])}
    torch.empty = empty
    answers["choices"] = choices()
    torch.save(answers, answers_file)


def poison(x: torch.Tensor) -> torch.Tensor:
    """All bits set: NaN in every float dtype here."""
    x.untyped_storage().fill_(255)
    return x


if __name__ == "__main__":
    main(*sys.argv[1:])
