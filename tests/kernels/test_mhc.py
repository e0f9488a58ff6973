# SPDX-License-Identifier: Apache-2.0
"""mHC from sublayer to sublayer: the plain form against the model's own pieces, Triton's against the plain form.

Run as a program, with Triton's interpreter, this file answers the cases of one file into another.
"""

import random
import sys

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, mhc
from deepseek_v41_plugin.kernels.formats.rowfp8 import row_quantize
from deepseek_v41_plugin.kernels.mhc import MixerWeights, prepare, reference
from deepseek_v41_plugin.kernels.mhc.weights import CHUNK, split, tiles
from deepseek_v41_plugin.model.parameters import RMSNorm
from deepseek_v41_plugin.model.settings import Settings
from tests.interpreted import answers_of, compile_for_hopper, run

CPU = torch.device("cpu")
POISON = 1.7e38
EPS = 1e-20


def random_case(rng, rows: int, dim: int, config: tuple | None = None, dtype=torch.bfloat16, iterations: int = 20) -> dict:
    """A sublayer that is left and the next one's weights; products of order 1 before `scale`."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    size = 2.0 ** rng.randint(-6, 6)
    # Three parts of one size, so that each counts.
    parts = (rand(3, 24, 4 * dim) / (4 * dim) ** 0.5 * 2.0 ** torch.randint(-3, 2, (24, 1), generator=g)).bfloat16()
    fn = parts.double().sum(0).float()
    return {
        "stream": (rand(rows, 4, dim) * size).to(dtype), "y": (rand(rows, dim) * size).to(dtype),
        "post": 2 * torch.rand(rows, 4, generator=g), "comb": torch.softmax(rand(rows, 4, 4), -1), "pre": torch.rand(rows, 4, generator=g),
        "mixer": MixerWeights(fn, rand(24), rand(3).clamp(-2, 2), iterations, 1e-6, EPS, tiles(parts) if rng.random() < 0.7 else None),
        "weight": (1 + rand(dim) / 4).bfloat16(), "config": config,
    }


def leaving(case: dict) -> tuple:
    return case["stream"], case["y"], case["post"], case["comb"]


def entering(case: dict) -> tuple:
    return case["mixer"], case["weight"], EPS


def wide(case: dict, dtype: torch.dtype) -> dict:
    m = case["mixer"]
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and k != "weight" else v for k, v in case.items()} | {"mixer": m._replace(parts=None)}


# The plain form.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("switch", [False, True])
def test_plain_forms_are_the_models_pieces_bit_for_bit(run_rng, dtype, switch):
    case = random_case(run_rng, run_rng.randint(1, 40), 96, dtype=dtype)
    acc = torch.promote_types(dtype, torch.float32)
    case |= {name: case[name].to(acc) for name in ("post", "comb", "pre")}
    norm = RMSNorm(96, EPS, Settings(dtype=dtype))
    norm.weight.data.copy_(case["weight"])
    with invariant.switched(switch):
        stream, entered = mhc.turn(*leaving(case), case["pre"], *entering(case))
        want = mhc.expand(*leaving(case))
        assert stream.dtype == dtype and torch.equal(stream, want) and torch.equal(mhc.leave(*leaving(case)), want)
        x = norm(mhc.collapse(want, case["pre"]))
        mixes = mhc.mixes(want, *case["mixer"][:6])
        for got in (entered, mhc.enter(want, case["pre"], *entering(case))):
            assert got.fp8 is None and got.x.dtype == dtype and torch.equal(got.x, x)
            assert all(torch.equal(a, b) and a.dtype == acc for a, b in zip(got[2:], mixes, strict=True))
        assert torch.equal(mhc.last(*leaving(case), case["pre"], case["weight"], EPS), x)


def test_three_parts_are_the_whole(run_rng):
    g = torch.Generator().manual_seed(run_rng.randrange(1 << 30))
    fn = torch.randn(24, 500, generator=g) * 2.0 ** torch.randint(-80, 80, (24, 500), generator=g)
    fn[0, :3] = torch.tensor([0.0, 1.0, -(2.0 - 2.0**-23)])
    parts = split(fn)
    assert parts.dtype == torch.bfloat16 and parts.shape == (3, 24, 500)
    assert torch.equal(parts.double().sum(0), fn.double())
    tiled = prepare(fn)
    assert tiled.shape == (4, 4, 3, 24, CHUNK) and tiled.is_contiguous()
    for chunk in range(4):
        for copy in range(4):
            real = min(CHUNK, 125 - chunk * CHUNK)
            begin = copy * 125 + chunk * CHUNK
            assert torch.equal(tiled[chunk, copy, ..., :real], parts[..., begin : begin + real])
            assert not tiled[chunk, copy, ..., real:].any()


def test_cpu_takes_the_plain_form():
    for op in (mhc.enter, mhc.turn, mhc.leave, mhc.last):
        assert op.choose(CPU).name == "torch"
        assert ("triton", False, "Triton needs a GPU; its interpreter on the CPU is for tests") in op.explain(CPU)


# Triton.


def random_cases(rng) -> dict[str, dict]:
    """Tiles full and not, one chunk and several groups of them; the interpreter takes its time over rows."""
    return {
        "one row": random_case(rng, 1, 128, (16, 4, 1, False)),
        "by the table": random_case(rng, 2, 64),
        "half a chunk": random_case(rng, 3, 16, (64, 4, 1, False)),
        "two tiles": random_case(rng, 18, 96, (16, 4, 1, False)),
        "odd columns": random_case(rng, 5, 360, (64, 4, 1, False)),
        "groups": random_case(rng, 3, 608, (64, 4, 2, True)),
        "many rows": random_case(rng, 131, 40, (64, 4, 2, True)),
        "wide tiles": random_case(rng, 7, 288, (128, 8, 2, True)),
        "one iteration": random_case(rng, 2, 32, iterations=1),
        "no rows": random_case(rng, 0, 64),
    }


def answer(case: dict, device: str = "cpu") -> dict:
    """What Triton makes of a case, on `device`."""
    from deepseek_v41_plugin.kernels.mhc import triton_ends, triton_turn

    case = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    case["mixer"] = MixerWeights(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in case["mixer"]))
    config = case["config"] and triton_turn.Config(*case["config"])
    stream, entered = triton_turn.turn(*leaving(case), case["pre"], *entering(case), config=config)
    return {
        "stream": stream, "turned": entered, "entered": triton_turn.enter(stream, case["pre"], *entering(case), quantize=False, config=config),
        "left": triton_ends.leave(*leaving(case)), "last": triton_ends.last(*leaving(case), case["pre"], case["weight"], EPS),
    }


def check_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """got in bf16, want in float64 before its rounding: half a bf16 step, and `tolerance` of the largest value."""
    assert got.dtype == torch.bfloat16 and got.shape == want.shape, name
    if want.numel():
        off = (got.double() - want).abs() - want.abs() * 2.0**-8
        assert float(off.max()) <= tolerance * float(want.abs().max()), f"{name}: {float(off.max())}"


def check(name: str, case: dict, got: dict, tolerance: float = 1e-5) -> None:
    """Each step against float64 of what the step before it gave."""
    exact = wide(case, torch.float64)
    expanded = torch.einsum("tij,tid->tjd", exact["comb"], exact["stream"]) + exact["post"][..., None] * exact["y"][:, None]
    for part in ("stream", "left"):
        check_close(f"{name}: {part}", got[part], expanded, 1e-6)
    want = reference.enter(got["stream"].double(), exact["pre"], *entering(exact))
    check_close(f"{name}: last", got["last"], want.x, 2e-3)  # its own stream may be rounded otherwise
    for part in ("turned", "entered"):
        entered = got[part]
        check_close(f"{name}: {part}", entered.x, want.x, 1e-6)
        for a, b in zip(entered[2:], want[2:], strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}, {part}: {text}")
        if part == "entered":
            assert entered.fp8 is None
        else:
            q = row_quantize(entered.x)
            assert torch.equal(entered.fp8.q.view(torch.uint8), q.q.view(torch.uint8)) and torch.equal(entered.fp8.scale, q.scale), name


@pytest.fixture(scope="module")
def interpreted(run_seed, tmp_path_factory):
    """(cases, Triton's answers): one process with the interpreter answers all."""
    rng, folder = random.Random(f"{run_seed} mhc"), tmp_path_factory.mktemp("mhc")
    cases = random_cases(rng)
    return cases, answers_of(__file__, cases, folder)


def test_triton_is_the_plain_form(interpreted):
    cases, answers = interpreted
    for name, case in cases.items():
        check(name, case, answers[name])


def test_triton_compiles_for_hopper(tmp_path):
    run([__file__], TRITON_CACHE_DIR=str(tmp_path))


def compiled() -> None:
    from deepseek_v41_plugin.kernels.mhc import triton_ends, triton_finish, triton_turn

    floats = dict.fromkeys(("post", "comb", "pre", "partial", "base", "scale", "q_scale"), "*fp32") | dict.fromkeys(("norm_eps", "mix_eps", "mix_norm_eps"), "fp32")
    types = floats | dict.fromkeys(("stream", "y", "parts", "out", "norm_weight", "x"), "*bf16") | {"collapsed": "*i16", "q": "*u8"}
    types |= dict.fromkeys(("rows", "per", "mixing", "iterations"), "i32")
    none = dict.fromkeys(("y", "post", "comb"))
    for config, given in (((16, 4, 1, False), none), ((64, 4, 2, True), {})):
        tile = {"D": 64, "ROWS": config[0], "CHUNK": triton_turn.CHUNK, "GROUPED": config[3], "EXPAND": not given}
        compile_for_hopper(triton_turn._sums, types, tile | given, num_warps=config[1], num_stages=config[2])
    compile_for_hopper(triton_finish._finish, types, {"D": 64, "BLOCK": 64, "SUMS": 2, "PER": 8, "TOGETHER": 1, "QUANTIZE": True})
    compile_for_hopper(triton_finish._finish, types, {"D": 64, "BLOCK": 64, "SUMS": 1, "PER": 1, "TOGETHER": 128, "QUANTIZE": False, "q": None, "q_scale": None})
    for kernel in (triton_ends._leave, triton_ends._last):
        compile_for_hopper(kernel, types, {"D": 64, "BLOCK": 64})


def main(cases_file: str, answers_file: str) -> None:
    """Every new tensor is full of poison, so that what no kernel writes is seen."""
    from deepseek_v41_plugin.kernels.mhc import triton_ends, triton_turn

    cases, empty = torch.load(cases_file, weights_only=False), torch.empty
    torch.empty = lambda *shape, **options: poisoned(empty(*shape, **options))
    answers = {name: answer(case) for name, case in cases.items()}
    # Other streams are the plain form's, and so is any number of copies but 4.
    triton_turn._sums = triton_turn.finish = triton_ends._leave = triton_ends._last = None
    rng = random.Random(cases_file)
    for dtype in (torch.float32, torch.float64):
        case = wide(random_case(rng, 3, 32, dtype=dtype), dtype)
        got = answer(case)
        assert torch.equal(got["stream"], reference.expand(*leaving(case))) and torch.equal(got["left"], got["stream"])
        assert torch.equal(got["turned"].x, got["last"]) and got["turned"].fp8 is None
    torch.save(answers, answers_file)


def poisoned(x: torch.Tensor) -> torch.Tensor:
    x.view(torch.uint8).fill_(0x7F)
    return x


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else compiled()
