# SPDX-License-Identifier: Apache-2.0
"""Records and scalar codecs against the independent float64 formats of tests/reference."""

import pytest
import torch

from deepseek_v41_plugin.kernels.formats import blocks, scalar
from deepseek_v41_plugin.kernels.formats.records import cache_format
from tests.reference import formats as reference


@pytest.fixture
def rows(run_rng):
    """[64, 512] float64 over many octaves, with a zero row, exact powers of two and ties among them."""
    torch.manual_seed(run_rng.randrange(1 << 30))
    x = torch.randn(64, 512, dtype=torch.float64) * 2.0 ** torch.randint(-12, 12, (64, 1))
    x[0] = 0
    x[1] = 2.0 ** torch.randint(-6, 6, (512,)).double()
    x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).double().repeat(64)
    x[3] = -x[2]
    return x


@pytest.mark.parametrize(
    ("name", "kind", "dim", "want"),
    [
        ("auto", "window", 512, reference.quant_fp8),
        ("auto", "compressed", 512, reference.quant_kv_fp4),
        ("auto", "index", 128, reference.quant_index_fp4),
        ("fp8_ds_mla", "window", 512, lambda x: reference.quant_v4_record(x, 64)),
        ("fp8_ds_mla", "index", 128, reference.quant_index_fp8),
    ],
)
def test_records_round_as_the_reference(rows, name, kind, dim, want):
    record = getattr(cache_format(name, 512, 64, 128), kind)
    x = rows[:, :dim]
    encoded = record.encode(x)
    assert encoded.dtype == torch.uint8 and encoded.shape == (64, record.width)
    assert torch.equal(record.decode(encoded, torch.float64), want(x))
    assert torch.equal(record.round(x), want(x))


def test_record_widths_are_the_released_ones():
    trained, hopper = cache_format("auto", 512, 64, 128), cache_format("fp8_ds_mla", 512, 64, 128)
    assert (trained.window.width, trained.compressed.width, trained.index.width) == (528, 288, 68)
    assert (hopper.window.width, hopper.compressed.width, hopper.index.width) == (584, 584, 132)


def test_linear_inputs_round_as_the_reference(rows):
    assert torch.equal(blocks.round_fp8(rows), reference.quant_fp8(rows))
    # bf16 holds a rounded value exactly: 4 significant bits under a power of two.
    x = rows.bfloat16()
    assert torch.equal(blocks.round_fp8(x).double(), reference.quant_fp8(x.double()))


def test_every_e8m0_byte_and_e2m1_code():
    byte = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(scalar.e8m0_decode(byte, torch.float64), 2.0 ** (byte.double() - 127))
    assert torch.equal(scalar.e8m0_encode(byte.int() - 127), byte)
    codes = torch.arange(16, dtype=torch.uint8)
    values = scalar.e2m1_values(codes, torch.float64)
    again = scalar.e2m1_codes(values)
    assert torch.equal(again, codes)
    assert torch.equal(scalar.unpack_nibbles(scalar.pack_nibbles(codes)), codes)


def test_weights_under_block_scales(run_rng):
    torch.manual_seed(run_rng.randrange(1 << 30))
    weight = torch.randn(70, 96).mul(50).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 140, (3, 3), dtype=torch.uint8)
    got = blocks.dense_weight(weight, scale, torch.float64)
    for o, i in ((0, 0), (31, 32), (32, 31), (69, 95)):
        assert got[o, i] == weight[o, i].double() * 2.0 ** (int(scale[o // 32, i // 32]) - 127)
    packed = torch.randint(0, 256, (5, 32), dtype=torch.uint8)
    scale = torch.randint(110, 130, (5, 2), dtype=torch.uint8)
    got = blocks.mxfp4_rows(packed, scale, torch.float64)
    for o, k in ((0, 0), (1, 1), (3, 33), (4, 63)):
        code = int(packed[o, k // 2]) >> (4 * (k % 2)) & 15
        value = (-1) ** (code >> 3) * scalar.E2M1_GRID[code & 7]
        assert got[o, k] == value * 2.0 ** (int(scale[o, k // 32]) - 127)
