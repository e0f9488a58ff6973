# SPDX-License-Identifier: Apache-2.0
"""The reference's number formats and rotary positions, against brute force and by hand."""

import math

import pytest
import torch

from tests.reference import formats
from tests.reference.rope import Rope, frequencies

F64 = torch.float64


def nearest(x, grid):
    """Index of the nearest grid value, the even index among two equally near (grid[0] is 0)."""
    best = min(abs(x - g) for g in grid)
    near = [i for i, g in enumerate(grid) if abs(x - g) == best]
    return min(near, key=lambda i: i % 2)


def brute(xs, grid):
    return [math.copysign(grid[nearest(abs(x), grid)], x) for x in xs]


def probes(grid):
    """Every value, every midpoint and its two neighbours, and values beyond the last."""
    mids = [(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)]
    xs = [*grid, *mids, *(m * 0.9999 for m in mids), *(m * 1.0001 for m in mids), grid[-1] * 3]
    return [*xs, *(-x for x in xs)]


def test_e4m3_is_nearest_even_over_all_values():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    grid = codes.float().tolist()
    assert grid[-1] == 448 and grid[1] == 2**-9
    xs = probes(grid)
    got = formats.round_e4m3(torch.tensor(xs, dtype=F64))
    assert got.tolist() == brute(xs, grid)
    inside = torch.tensor([x for x in xs if abs(x) <= 448]).float()
    assert torch.equal(formats.round_e4m3(inside).float(), inside.to(torch.float8_e4m3fn).float())


def test_e2m1_is_nearest_even_over_all_values():
    xs = probes(formats.E2M1_GRID)
    got = formats.round_e2m1(torch.tensor(xs, dtype=F64)).tolist()
    assert got == brute(xs, formats.E2M1_GRID)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0]
    assert formats.round_e2m1(torch.tensor(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_scale_exponent_is_exact(largest):
    for e in (-120, -22, -1, 0, 1, 40):
        edge = torch.tensor(largest * 2.0**e, dtype=F64)
        above = torch.nextafter(edge, torch.tensor(torch.inf, dtype=F64))
        assert formats.ceil_log2_ratio(torch.stack([edge, above]), largest).tolist() == [e, e + 1]


def test_fp8_quantiser_by_hand():
    x = torch.zeros(3, 64, dtype=F64)
    x[0, 0], x[0, 1] = 448, 17  # s = 1; 17 lies between 16 and 18, 16 is even
    x[0, 32] = 449  # s = 2; 224.5 -> 224
    x[1, 0] = 1e-5  # below the floor of 1e-4: s = 2**-22; 41.94 -> 40
    q = formats.quant_fp8(x)
    assert q[0, :2].tolist() == [448, 16] and q[0, 32] == 448
    assert q[1, 0] == 40 * 2.0**-22 and q[2].abs().max() == 0


def test_global_kv_quantiser_by_hand():
    x = torch.zeros(2, 16, dtype=F64)
    x[0, :4] = torch.tensor([12.0, -5.0, 2.6, 0.4])  # s = 2: 6, -2.5 -> -2, 1.3 -> 1.5, 0.2 -> 0
    x[1, :2] = torch.tensor([6.2, 3.0])  # s = e4m3(1.0333) = 1: 6.2 saturates
    q = formats.quant_kv_fp4(x)
    assert q[0, :4].tolist() == [12, -4, 3, 0] and q[1, :2].tolist() == [6, 3]
    smallest = formats.quant_kv_fp4(torch.full((1, 16), 2.0**-10, dtype=F64))  # s = 2**-9
    assert smallest.abs().max() == 2.0**-10


def test_index_quantiser_by_hand():
    x = torch.zeros(1, 64, dtype=F64)
    x[0, :3] = torch.tensor([7.0, 1.5, -2.6])  # s = 2: 3.5 -> 4, .75 -> 1, -1.3 -> -1.5
    x[0, 32] = 6.0  # s = 1
    q = formats.quant_index_fp4(x)
    assert q[0, :3].tolist() == [8, 2, -3] and q[0, 32] == 6


def test_v4_record_splits_at_rope():
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0), dtype=F64)
    q = formats.quant_v4_record(x, 64)
    for g in range(7):
        part = slice(64 * g, 64 * g + 64)
        assert torch.equal(q[:, part], formats.quant_fp8(x[:, part], 64))
    assert torch.equal(q[:, 448:], x[:, 448:].float().bfloat16().double())


def test_stored_formats():
    packed = torch.tensor([[0x2F, 0x70, *[0] * 14]], dtype=torch.uint8).view(torch.int8)
    scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = formats.decode_mxfp4(packed, scale)
    assert got.shape == (1, 32) and got[0, :4].tolist() == [-12, 2, 0, 12]
    weight = torch.ones(40, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 126], [128, 0]], dtype=torch.uint8)
    got = formats.decode_fp8(weight, scale.view(torch.float8_e8m0fnu), (32, 32))
    assert got[0, 0] == 1 and got[31, 32] == 0.5 and got[32, 31] == 2 and got[39, 63] == 2.0**-127


# -- RoPE -----------------------------------------------------------------------------------


def test_rope_inverse_pairs_and_relativity():
    rope = Rope(16, 10000.0, None, "cpu")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 64, generator=g, dtype=F64)
    pos = torch.tensor([0, 1, 5, 9, 100, 255])
    y = rope(x, pos)
    assert torch.equal(y[..., :48], x[..., :48]) and torch.equal(y[0], x[0])
    assert torch.allclose(rope(y, pos, inverse=True), x, atol=1e-14)
    turn = torch.view_as_complex(x[2, 0, 48:].view(8, 2).contiguous())
    turn = turn * torch.exp(1j * 5 * rope.freqs)
    assert torch.allclose(y[2, 0, 48:], torch.view_as_real(turn).flatten(), atol=1e-14)
    q, k = x[:1, 0], x[1:2, 0]
    dots = [float((rope(q, pos[i : i + 1]) * rope(k, pos[i : i + 1] + 3)).sum()) for i in (0, 4)]
    assert dots[0] == pytest.approx(dots[1], abs=1e-12)


def test_yarn_by_hand():
    """Released values: d(32) = 15.46 -> 15 and d(1) = 24.71 -> 25."""
    yarn = {"factor": 16, "beta_fast": 32, "beta_slow": 1}
    yarn["original_max_position_embeddings"] = 65536
    got = frequencies(64, 160000, yarn)
    for i in range(32):
        f = 160000 ** (-2 * i / 64)
        share = 0 if i <= 15 else 1 if i >= 25 else (i - 15) / 10
        assert got[i] == pytest.approx(f * (1 - share) + f / 16 * share, rel=1e-14)
    assert frequencies(64, 10000, None)[8] == pytest.approx(0.1)
