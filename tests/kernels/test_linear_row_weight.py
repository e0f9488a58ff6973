# SPDX-License-Identifier: Apache-2.0
"""Row weights against the float64 values of the blocks they come from."""

import importlib

import pytest
import torch

from deepseek_v41_plugin.kernels.formats.blocks import dense_weight
from deepseek_v41_plugin.kernels.linear import row_weight
from tests.kernels.test_linear import fp8_values, generator

MODULE = importlib.import_module("deepseek_v41_plugin.kernels.linear.row_weight")
SHAPES = [(96, 160), (70, 100), (1, 1), (32, 32), (33, 31)]


def blocks(g: torch.Generator, outputs: int, depth: int, apart: int, lowest: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite values, each block's largest above 224; scales at most 2^apart apart within 32 rows."""
    weight = fp8_values(g, outputs, depth)
    weight[::32, ::32] = torch.tensor(-448.0 if apart % 2 else 256.0).to(torch.float8_e4m3fn)
    size = -(-outputs // 32), -(-depth // 32)
    base = torch.randint(lowest, lowest + 20, (size[0], 1), generator=g)
    return weight, (base + torch.randint(0, apart + 1, size, generator=g)).to(torch.uint8)


def block_largest(values: torch.Tensor) -> torch.Tensor:
    """The largest of each value's 32 x 32 block, by loops."""
    out = torch.empty_like(values)
    for i in range(0, values.shape[0], 32):
        for j in range(0, values.shape[1], 32):
            out[i : i + 32, j : j + 32] = values[i : i + 32, j : j + 32].abs().max()
    return out


@pytest.mark.parametrize("slab", [1 << 24, 64, 5000])
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_values_stay_within_the_bound(run_rng, monkeypatch, outputs, depth, slab):
    monkeypatch.setattr(MODULE, "SLAB", slab)
    weight, scale = blocks(generator(run_rng), outputs, depth, run_rng.randrange(7))
    before = weight.clone()
    rows = row_weight(weight, scale)
    want = dense_weight(weight, scale, torch.float64)
    assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8))
    assert rows.q.dtype == torch.float8_e4m3fn and rows.q.shape == (outputs, depth)
    assert rows.scale.dtype == torch.float32 and rows.scale.shape == (outputs,) and bool((torch.frexp(rows.scale)[0] == 0.5).all())
    error = (rows.values(torch.float64) - want).abs()
    assert bool((error <= 2.0**-11 * block_largest(want)).all())
    # What is normal under the row's scale keeps all its bits, and a row uses all of E4M3's range.
    assert bool((error[want.abs() >= 2.0**-6 * rows.scale.double()[:, None]] == 0).all())
    largest = rows.q.float().abs().amax(-1)
    assert bool(((largest > 224) | (want == 0).all(-1)).all())


def test_one_scale_a_block_row_is_exact(run_rng):
    """As long as the row's own largest value lies no higher than its block's scale was made for, nothing is rounded."""
    weight, scale = blocks(generator(run_rng), 64, 96, 0)
    rows = row_weight(weight, scale)
    assert torch.equal(rows.values(torch.float64), dense_weight(weight, scale, torch.float64))


def test_in_place_writes_into_the_weight(run_rng):
    weight, scale = blocks(generator(run_rng), 70, 100, 5)
    apart = row_weight(weight, scale)
    rows = row_weight(weight, scale, in_place=True)
    assert rows.q.data_ptr() == weight.data_ptr() and torch.equal(rows.q.view(torch.uint8), apart.q.view(torch.uint8))
    assert torch.equal(rows.scale, apart.scale)


def far(weight: torch.Tensor, scale: torch.Tensor, exponent: int) -> None:
    """One block 2^exponent below its row; its last value is off by half of 2^-9 there, if that is a step too fine."""
    scale[0, 1] = scale[0, 0] - exponent
    weight[:32, :32] = 448.0
    weight[:32, 32:64] = 0.0
    weight[0, 32] = 256.0
    weight[31, 63] = 2.0 ** (exponent - 10)


@pytest.mark.parametrize("in_place", [False, True])
def test_none_beyond_the_bound_and_nothing_written(run_rng, monkeypatch, in_place):
    """Half a step is 2^-10 of the row's scale: 2^(e-10) of the block's, allowed up to 256 * 2^-11."""
    monkeypatch.setattr(MODULE, "SLAB", 2000)
    for exponent, fits in ((7, True), (8, False)):
        weight, scale = blocks(generator(run_rng), 96, 96, 0)
        # The row of that block may be in any slab: the others come first or last.
        far(weight, scale, exponent)
        weight, scale = torch.cat((weight[32:], weight[:32])), torch.cat((scale[1:], scale[:1]))
        before = weight.clone()
        rows = row_weight(weight, scale, in_place)
        assert (rows is not None) == fits
        if not fits:
            assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8))


def test_not_finite_is_none(run_rng):
    for place in ("value", "scale", "scale of zeros"):
        weight, scale = blocks(generator(run_rng), 64, 64, 2)
        if place == "value":
            weight[run_rng.randrange(64), run_rng.randrange(64)] = float("nan")
        else:
            scale[1, 1] = 255
            if place == "scale of zeros":
                weight[32:, 32:] = 0
        assert row_weight(weight, scale) is None


def test_the_ends_of_the_scales(run_rng):
    """Zeros under any scale, rows of zeros, and values that float32 cannot hold or holds without all bits."""
    weight, scale = blocks(generator(run_rng), 64, 64, 0)
    weight[:32] = 0
    scale[0] = torch.tensor([254, 0])
    rows = row_weight(weight, scale)
    assert bool((rows.scale[:32] == 1).all()) and not rows.q[:32].float().any()
    assert torch.equal(rows.values(torch.float64), dense_weight(weight, scale, torch.float64))

    weight, scale = blocks(generator(run_rng), 32, 32, 0)
    for byte in (254, 1):
        rows = row_weight(weight, torch.full_like(scale, byte))
        assert torch.equal(rows.values(torch.float64), weight.double() * 2.0 ** (byte - 127))
    assert row_weight(torch.full((32, 32), 2.0**-9).to(torch.float8_e4m3fn), torch.zeros(1, 1, dtype=torch.uint8)) is None
    assert row_weight(weight[:0], scale[:0]).q.shape == (0, 32)
