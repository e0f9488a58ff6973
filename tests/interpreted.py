# SPDX-License-Identifier: Apache-2.0
"""A test file run as a program: with Triton's interpreter, or with its compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def answers_of(file: str, cases, folder: Path):
    """What `file CASES ANSWERS` leaves in its second file, under the interpreter, of cases in its first."""
    torch.save(cases, folder / "cases")
    run([file, folder / "cases", folder / "answers"], TRITON_INTERPRET="1")
    return torch.load(folder / "answers", weights_only=False)


def run(arguments: list, **variables: str) -> None:
    """A Python program, without the interpreter unless it is asked for."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def compile_for_hopper(kernel, types: dict[str, str], values: dict, **options) -> None:
    """`kernel` for SM90 down to machine code, in a program without the interpreter, which lets pass what the compiler does not.

    types: of the arguments that are no constants; those of `values` are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in values else types[name] for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in values.items()}, aligned)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
