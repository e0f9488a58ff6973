# SPDX-License-Identifier: Apache-2.0
"""Latents into caches: the plain form against loops, Triton's against the plain form.

Run as a program, with Triton's interpreter, this file answers the cases of one file into another.
"""

import random
import sys

import pytest
import torch

from deepseek_v41_plugin.kernels import invariant, latent
from deepseek_v41_plugin.kernels.formats.records import Fp8IndexRecord, Fp8RopeRecord, GlobalRecord, IndexRecord, Record, WindowRecord
from deepseek_v41_plugin.kernels.latent import reference
from deepseek_v41_plugin.kernels.rope import rope
from deepseek_v41_plugin.model.parameters import RMSNorm
from deepseek_v41_plugin.model.settings import Settings
from deepseek_v41_plugin.model.step import requests_of
from tests.interpreted import answers_of, compile_for_hopper, run

CPU = torch.device("cpu")
EPS = 1e-20
POISON = 0xA5
RECORDS = [WindowRecord(512), GlobalRecord(512), IndexRecord(128), Fp8RopeRecord(512, 64), Fp8IndexRecord(128)]
SMALL = [WindowRecord(64), GlobalRecord(64), IndexRecord(32), Fp8RopeRecord(128, 64), Fp8IndexRecord(32)]


def generator(rng) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 30))


def frequencies(dim: int) -> torch.Tensor:
    return 160000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def rows_with_ties(g: torch.Generator, rows: int, dim: int) -> torch.Tensor:
    """bf16 rows over many octaves; among them zeros, signed zeros, powers of two, midpoints of E2M1 and E4M3, and rows
    whose largest value is just what a scale holds."""
    x = torch.randn(rows, dim, generator=g) * 2.0 ** torch.randint(-14, 14, (rows, 1), generator=g)
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 17 / 16, 19 / 16, 21 / 16, 0.0])
    largest = torch.tensor([6.0, 7.0])[torch.randint(0, 2, (rows, 1), generator=g)] * 2.0 ** torch.randint(-9, 9, (rows, 1), generator=g)
    signs = torch.randint(0, 2, (rows, dim), generator=g) * 2.0 - 1
    kinds = torch.stack((x, grid[torch.randint(0, 12, (rows, dim), generator=g)] * signs, 2.0 ** torch.randint(-9, 9, (rows, dim), generator=g).float(), 0 * signs, largest * signs))
    return kinds[torch.randint(0, 5, (rows,), generator=g), torch.arange(rows)].bfloat16()


def record_case(rng, record: Record, rows: int, ratio: int, norm: bool, rope_dim: int = 64) -> dict:
    """Rows at any positions, the first of them at 0, where RoPE changes nothing; blocks with room between them; some slots are -1."""
    g = generator(rng)
    block_size = ratio * rng.randint(3, 9)
    blocks = rows // block_size + 4
    slots = torch.randperm((blocks - 1) * block_size, generator=g)[:rows] + block_size
    slots[torch.rand(rows, generator=g) < 0.15] = -1
    positions = torch.where(torch.rand(rows, generator=g) < 0.4, torch.randint(0, ratio, (rows,), generator=g), torch.randint(0, 1 << 20, (rows,), generator=g))
    slots, positions = (torch.stack((x, x - 1), 1)[:, 0] for x in (slots, positions))  # not contiguous
    return {
        "x": rows_with_ties(g, rows, record.dim), "weight": (1 + torch.randn(record.dim, generator=g) / 4).bfloat16() if norm else None,
        "positions": positions, "freq": frequencies(rope_dim), "slots": slots, "record": record, "ratio": ratio,
        "block_size": block_size if rng.random() < 0.7 or ratio == 1 else None, "shape": (blocks, block_size // ratio, record.width),
        "gap": rng.choice((0, 16, 48, 5)),
    }


def new_cache(case: dict, device: str = "cpu") -> torch.Tensor:
    """[blocks, states, width] full of poison, `gap` bytes between blocks."""
    blocks, states, width = case["shape"]
    return torch.full((blocks, states * width + case["gap"]), POISON, dtype=torch.uint8, device=device)


def cache_of(case: dict, whole: torch.Tensor) -> torch.Tensor:
    blocks, states, width = case["shape"]
    return whole[:, : states * width].unflatten(1, (states, width))


def pair_case(rng, requests: int, longest: int, dim: int, padding: int = 0) -> dict:
    """Requests with chunks of up to `longest` tokens behind random contexts; rings of more blocks than are used."""
    g = generator(rng)
    counts = [rng.randint(0, longest) for _ in range(requests)]
    first = torch.tensor([0, *counts]).cumsum(0)
    rows, states = int(first[-1]) + padding, rng.randint(8, 11)
    begin = torch.tensor([rng.choice((0, 1, rng.randrange(1 << 20))) for _ in range(requests)])
    req = torch.cat((requests_of(first, rows - padding), torch.tensor([rng.choice((requests, -1, requests - 1)) for _ in range(padding)], dtype=torch.int64)))
    positions = torch.arange(rows)
    positions[: rows - padding] += (begin - first[:-1])[req[: rows - padding]]
    positions[rows - padding :] = -1
    return {
        "state": torch.randn(rows, 2 * dim, generator=g) * 4, "positions": positions, "req": req, "first": first, "padding": padding,
        "ring": torch.randn(requests + 3, states, 2 * dim + rng.choice((0, 8)), generator=g)[..., : 2 * dim],
        "table": (torch.randperm(requests + 2, generator=g)[:requests, None] + 1).int().repeat(1, 2),
    }


# The plain form.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("switch", [False, True])
def test_plain_records_lie_where_their_slots_say(run_rng, dtype, switch):
    for record in SMALL:
        for ratio in (1, 2):
            case = record_case(run_rng, record, 23, ratio, norm=True, rope_dim=64 if record.name == "fp8_rope" else 16)
            x, positions = case["x"].to(dtype), case["positions"]
            norm = RMSNorm(record.dim, EPS, Settings(dtype=dtype))
            norm.weight.data.copy_(case["weight"])
            whole, want_cache = new_cache(case), new_cache(case)
            cache, want_rows = cache_of(case, whole), cache_of(case, want_cache)
            with invariant.switched(switch):
                got = latent.write_record(x, case["weight"], EPS, positions, case["freq"], case["slots"], cache, record, ratio, case["block_size"])
                want = norm(x)
                bytes_ = record.encode(rope(want, positions // ratio * ratio, case["freq"]))
            for t, (slot, position) in enumerate(zip(case["slots"].tolist(), positions.tolist(), strict=True)):
                if slot >= 0 and (position % 2 or ratio == 1):
                    block, offset = divmod(slot, case["shape"][1] * ratio)
                    want_rows[block, offset // ratio] = bytes_[t]
            cache[0] = want_rows[0]  # where write_rows sends what is not written
            assert got.dtype == dtype and torch.equal(got, want) and torch.equal(whole, want_cache)
            assert latent.write_record(x, None, EPS, positions, case["freq"], case["slots"], cache, record, ratio, case["block_size"]) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("switch", [False, True])
def test_plain_pairs_are_a_loops(run_rng, dtype, switch):
    """Token by token, each with the one before it; then what the ring must hold."""
    for _ in range(5):
        case = pair_case(run_rng, 5, 20, 24, padding=3)
        state, ring = case["state"].to(dtype), case["ring"].to(dtype).clone()
        states, want_ring = ring.shape[1], ring.clone()
        with invariant.switched(switch):
            got = latent.pair_latents(state, case["positions"], case["req"].clamp(0, 4), case["first"], ring, case["table"])
        for r in range(5):
            own = want_ring[int(case["table"][r, 0])]
            for t in range(*case["first"][r : r + 2].tolist()):
                position = int(case["positions"][t])
                (a, g), (b, h) = own[(position - 1) % states].double().chunk(2), state[t].double().chunk(2)
                share = torch.sigmoid(g - h)
                torch.testing.assert_close(got[t].double(), a * share + b * (1 - share), rtol=1e-5, atol=1e-5)
                own[position % states] = state[t]
        ring[0] = want_ring[0]
        assert got.dtype == dtype and torch.equal(ring, want_ring)


def test_plain_rope_turns_pairs(run_rng):
    for dtype, accuracy in ((torch.bfloat16, 2.0**-7), (torch.float32, 1e-6), (torch.float64, 1e-12)):
        x = torch.randn(9, 3, 40, generator=generator(run_rng), dtype=torch.float64).to(dtype)
        positions, freq = torch.randint(0, 1 << 20, (9,), generator=generator(run_rng)), frequencies(16)
        turns = torch.exp(1j * positions[:, None, None] * freq)
        want = torch.view_as_real(torch.view_as_complex(x[..., 24:].double().unflatten(-1, (8, 2))) * turns).flatten(-2)
        got = rope(x, positions, freq)
        assert got.dtype == dtype and torch.equal(got[..., :24], x[..., :24])
        assert float((got[..., 24:].double() - want).abs().max()) <= accuracy * 4
        back = rope(got, positions, freq, inverse=True)
        assert float((back - x).abs().max()) <= accuracy * 8


def test_cpu_takes_the_plain_form():
    for op in (latent.write_record, latent.pair_latents):
        assert op.choose(CPU).name == "torch"
        assert ("triton", False, "Triton needs a GPU; its interpreter on the CPU is for tests") in op.explain(CPU)


# Triton.


def random_cases(rng) -> tuple[dict[str, dict], list[dict]]:
    records = {}
    for record in RECORDS:
        for ratio in (1, 2):
            for norm in (True, False):
                records[f"{record.name}, ratio {ratio}, {'normed here' if norm else 'normed before'}"] = record_case(rng, record, 19, ratio, norm)
    for record in SMALL:
        records[f"{record.name} of {record.dim}"] = record_case(rng, record, 9, rng.choice((1, 2)), True, 64 if record.name == "fp8_rope" else 16)
    records["no rows"] = record_case(rng, RECORDS[0], 0, 1, True)
    return records, [pair_case(rng, 4, 24, 48), pair_case(rng, 3, 2, 512), pair_case(rng, 3, 30, 32, padding=4), pair_case(rng, 2, 0, 16, padding=2)]


def answer(case: dict, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(latents, the whole cache) of Triton's form."""
    from deepseek_v41_plugin.kernels.latent import triton_record

    given = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in case.items()}
    whole = new_cache(case, device)
    got = triton_record.write_record(
        given["x"], given["weight"], EPS, given["positions"], given["freq"], given["slots"], cache_of(case, whole), case["record"], case["ratio"], case["block_size"],
    )
    return got, whole


def pair_answer(case: dict, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(means, ring) of Triton's form."""
    from deepseek_v41_plugin.kernels.latent import triton_pairs

    given = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in case.items()}
    ring = given["ring"].clone()
    return triton_pairs.pair_latents(given["state"], given["positions"], given["req"], given["first"], ring, given["table"]), ring


def check_records(name: str, case: dict, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The latent within half a bf16 step of float64's; the cache byte for byte what the plain form writes of it."""
    normed, whole = (x.cpu() for x in got)
    if case["weight"] is None:
        assert torch.equal(normed, case["x"]), name
    else:
        exact = reference.rms_norm(case["x"].double(), case["weight"], EPS)
        assert normed.dtype == torch.bfloat16 and bool(((normed.double() - exact).abs() <= exact.abs() * (2.0**-8 + 1e-6)).all()), name
    want = new_cache(case)
    kept = case["slots"] >= 0  # the plain form sends the others to slot 0
    rows = (normed[kept], None, EPS, case["positions"][kept], case["freq"], case["slots"][kept])
    spare = cache_of(case, want)[0].clone()
    reference.write_record(*rows, cache_of(case, want), case["record"], case["ratio"], case["block_size"])
    cache_of(case, want)[0] = spare
    assert torch.equal(whole, want), f"{name}: {int((whole != want).sum())} bytes"


def check_pairs(case: dict, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    means, ring = (x.cpu() for x in got)
    real = len(means) - case["padding"]
    rows = [case[name][:real] for name in ("state", "positions", "req")]
    want_ring = case["ring"].clone()
    want = reference.pair_latents(rows[0].double(), *rows[1:], case["first"], want_ring.double(), case["table"])
    reference.pair_latents(*rows, case["first"], want_ring, case["table"])
    want_ring[0] = case["ring"][0]
    assert torch.equal(ring, want_ring)
    torch.testing.assert_close(means[:real].double(), want, rtol=1e-5, atol=1e-5)
    assert bool(means.isfinite().all())


@pytest.fixture(scope="module")
def interpreted(run_seed, tmp_path_factory):
    """(cases, Triton's answers): one process with the interpreter answers all."""
    rng, folder = random.Random(f"{run_seed} latent"), tmp_path_factory.mktemp("latent")
    cases = random_cases(rng)
    return cases, answers_of(__file__, cases, folder)


def test_triton_writes_the_plain_forms_bytes(interpreted):
    (records, _), (answers, _, _) = interpreted
    for name, case in records.items():
        check_records(name, case, answers[name])


def test_triton_pairs_are_the_plain_forms(interpreted):
    (_, pairs), (_, forward, _) = interpreted
    for case, got in zip(pairs, forward, strict=True):
        check_pairs(case, got)


def test_pairs_do_not_depend_on_the_programs_order(interpreted):
    """Programs of a launch run in any order: here from the last to the first."""
    (_, pairs), (_, forward, backward) = interpreted
    for case, a, b in zip(pairs, forward, backward, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_triton_compiles_for_hopper(tmp_path):
    run([__file__], TRITON_CACHE_DIR=str(tmp_path))


def compiled() -> None:
    from deepseek_v41_plugin.kernels.latent import triton_pairs, triton_record

    types = dict.fromkeys(("x", "norm_weight", "latent"), "*bf16") | dict.fromkeys(("positions", "slots", "req", "first"), "*i64")
    types |= dict.fromkeys(("state", "ring", "out"), "*fp32") | {"freq": "*fp64", "cache": "*u8", "block_table": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("x_stride", "block_stride", "block_size", "requests", "state_stride", "states", "table_stride"), "i32")
    for i, record in enumerate(RECORDS):
        shape = {"D": record.dim, "ROPE": 64, "GROUP": triton_record.GROUPS[type(record)] or record.dim, "KIND": record.name, "STATE": record.width}
        given = {"NORM": True, "RATIO": 2} if i % 2 else {"NORM": False, "RATIO": 1, "norm_weight": None}
        compile_for_hopper(triton_record._write, types, shape | given, num_warps=1, enable_fp_fusion=False)
    compile_for_hopper(triton_pairs._pairs, types, {"D": 512, "BLOCK": 512})


def main(cases_file: str, answers_file: str) -> None:
    """Every new tensor is full of poison, so that what no kernel writes is seen."""
    from triton.runtime.interpreter import interpreter_builder

    from deepseek_v41_plugin.kernels.latent import triton_pairs, triton_record

    (records, pairs), empty = torch.load(cases_file, weights_only=False), torch.empty
    torch.empty = lambda *shape, **options: empty(*shape, **options).fill_(float("nan"))
    answers = {name: answer(case) for name, case in records.items()}
    forward, set_index, backward = [pair_answer(case) for case in pairs], interpreter_builder.set_grid_idx, []
    for case in pairs:
        rows = len(case["state"])
        interpreter_builder.set_grid_idx = lambda x, y, z, rows=rows: set_index(rows - 1 - x, y, z)
        backward.append(pair_answer(case))
    torch.save((answers, forward, backward), answers_file)

    # What the kernels do not take is the plain form's.
    triton_record._write = triton_pairs._pairs = None
    rng = random.Random(cases_file)
    for record, x, dim in ((WindowRecord(96), torch.bfloat16, 16), (WindowRecord(64), torch.float64, 16), (Fp8RopeRecord(64, 16), torch.bfloat16, 16)):
        case = record_case(rng, record, 5, 1, True, dim)
        answer(case | {"x": case["x"].to(x)})
    case = pair_case(rng, 2, 9, 8)
    pair_answer(case | {"state": case["state"].double(), "ring": case["ring"].double()})


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else compiled()
