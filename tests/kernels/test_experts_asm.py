# SPDX-License-Identifier: Apache-2.0
"""The PTX that decodes weights, run instruction by instruction: the interpreter takes a plain form in its place."""

import re
from pathlib import Path

import pytest
import torch

from deepseek_v41_plugin.kernels.formats.scalar import E2M1_GRID
from deepseek_v41_plugin.kernels.moe import narrow

SOURCE = Path(narrow.__file__).with_name("triton_mxfp4.py").read_text()
GRID = [*E2M1_GRID, *(-v for v in E2M1_GRID)]
WORD = 0xFFFFFFFF


def asm(function: str) -> list[list[str]]:
    """The instructions of a function's block, each as [name, operand, ...]."""
    block = re.search(rf"def {function}\(.*?\"\"\"\{{(.*?)\}}\"\"\"", SOURCE, re.S).group(1)
    lines = [line.strip().replace(",", " ").split() for line in block.split(";")]
    return [line for line in lines if line and line[0] != ".reg"]


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


def prmt(a: int, b: int, selector: int) -> int:
    """Byte i of the result is byte (selector's nibble i) & 7 of b:a; bit 3 spreads that byte's sign."""
    source, out = (a | b << 32).to_bytes(8, "little"), []
    for i in range(4):
        s = selector >> 4 * i & 15
        out.append(source[s & 7] if s < 8 else 0xFF * (source[s & 7] >> 7))
    return int.from_bytes(bytes(out), "little")


OPS = {"shl.b32": lambda a, n: a << n & WORD, "shr.u32": lambda a, n: a >> n, "and.b32": lambda a, b: a & b, "lop3.b32": lop3, "prmt.b32": prmt}


def run(function: str, registers: dict[str, int]) -> torch.Tensor:
    """Values [2, 4] of the low and of the high nibbles of the four bytes in $2; $0 and $1 are no input's register (=&r)."""
    for name, target, *operands in asm(function):
        registers[target] = OPS[name](*(registers[o] if o in registers else int(o, 0) for o in operands))
    out = [list(registers[r].to_bytes(4, "little")) for r in ("$0", "$1")]
    return torch.tensor(out, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def words(rng) -> list[list[int]]:
    """Four bytes each: every byte once in each place."""
    places = [rng.sample(range(256), 256) for _ in range(4)]
    return [list(four) for four in zip(*places, strict=True)]


def grid(four: list[int]) -> torch.Tensor:
    return torch.tensor([[GRID[b & 15] for b in four], [GRID[b >> 4] for b in four]], dtype=torch.float64)


def test_placed(run_rng):
    for four in words(run_rng):
        assert torch.equal(run("place", {"$2": int.from_bytes(bytes(four), "little")}), grid(four) / 64)


@pytest.mark.parametrize("octaves", range(12))
def test_looked_up(run_rng, octaves):
    low, high = (int(c, 16) for c in re.search(r"return (0x\w+) - octaves \* 0x08080800, (0x\w+) - octaves \* 0x08080808", SOURCE).groups())
    for four in words(run_rng):
        registers = {"$2": int.from_bytes(bytes(four), "little"), "$3": low - octaves * 0x08080800, "$7": high - octaves * 0x08080808}
        assert torch.equal(run("look_up", registers), grid(four) * 2.0 ** (6 - octaves))


def test_outputs_take_no_inputs_place():
    assert re.findall(r'"(=\S*?),r', SOURCE) == ["=&r,=&r", "=&r,=&r"]
