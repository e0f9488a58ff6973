# SPDX-License-Identifier: Apache-2.0
"""The device's scripts: results come back from each call, a lost device is tried again, a limit ends a call."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "bench" / "hopper").glob("*.sh"))


def run(script: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "ROOT": str(tmp_path / "root"), "OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "DSV41_COMMIT": "test", **env}
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_a_broken_part_stops_the_preparation(tmp_path):
    device = tmp_path / ".device"
    device.mkdir()
    (tmp_path / "some.py").write_text("x = 1")
    subprocess.run(["tar", "cJf", str(device / "part-1.tar.xz"), "-C", str(tmp_path), "some.py"], check=True)
    env = {**os.environ, "ROOT": str(tmp_path / "root"), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "bench" / "hopper" / "prepare.sh")]
    assert subprocess.run(command, cwd=tmp_path, env=env).returncode == 0
    assert (tmp_path / "root" / "v41" / "some.py").read_text() == "x = 1"
    (device / "part-2.tar.xz").write_bytes(b"half a part")
    assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode != 0


def test_kernels_go_through_and_come_back(tmp_path):
    done = run("bash bench/hopper/kernels.sh 'norm_rows|mhc_turn'", tmp_path, EXTRA="--device cpu")
    assert done.returncode == 0 and "norm_rows/t5/torch" in done.stdout, done.stdout + done.stderr
    rows = (tmp_path / "out" / "kernels.csv").read_text().splitlines()
    assert len(rows) == 3 and (tmp_path / "out" / "kernels.log").exists()
    again = run("bash bench/hopper/kernels.sh 'norm_rows|mhc_turn'", tmp_path, EXTRA="--device cpu")
    assert again.returncode == 0 and (tmp_path / "out" / "kernels.csv").read_text().splitlines() == rows, "nothing is measured twice"


def test_kernels_times_no_plain_form_unasked():
    """The default of kernels.sh over the names of all cells."""
    from hopper.cases import CASES
    from hopper.hosts import HOSTS

    from deepseek_v41_plugin import kernels
    from deepseek_v41_plugin.kernels import registry

    for module in pkgutil.iter_modules(kernels.__path__):
        if module.ispkg:
            importlib.import_module(f"{kernels.__name__}.{module.name}")
    (wanted,) = re.findall(r"^default='(.*)'$", (ROOT / "bench" / "hopper" / "kernels.sh").read_text(), re.MULTILINE)
    timed = ("moe_experts", "row_linear", "attend", "index_select", "mhc_turn", "group_linear", "wide_linear", "latent_write_record",
             "latent_pair_latents", "norm_rows", "moe_route")
    assert re.search(wanted, "ceiling/copy") and set(HOSTS) <= set(timed)
    for case in CASES:
        for variant in case.variants:
            name = "/".join(filter(None, (case.op, variant, "t64")))
            others = [impl.name for impl in registry.OPS[case.op].impls if impl.name != "torch"]
            others += [f"{impl}:warps=4" for impl in others] + [f"host-{label}" for label, _ in HOSTS.get(case.op, ())]
            assert others or case.op not in timed, case.op
            assert not re.search(wanted, f"{name}/torch"), name
            for other in others:
                assert bool(re.search(wanted, f"{name}/{other}")) == (case.op in timed), (name, other)


def test_tests_on_the_device_go_on_behind_a_failure(tmp_path):
    """A file that fails, one that hangs, one that passes; then all of them by default, and one behind the limit."""
    python = tmp_path / "python"
    python.write_text('''#!/usr/bin/env bash
echo "asked for: $*"
case "$*" in
    *test_bad.py) echo "FAILED tests/gpu/test_bad.py::test_x"; echo "1 failed in 0.1s"; exit 1 ;;
    *test_hangs.py) while :; do read -t 1 <> <(:); done ;;
esac
echo "3 passed in 0.1s"
''')
    python.chmod(0o755)
    done = run("bash bench/hopper/tests.sh bad hangs good", tmp_path, PYTHON=str(python), EACH="2")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and "FAILED tests/gpu/test_bad.py::test_x" in lines, done.stdout + done.stderr
    said = [line.split() for line in lines[lines.index("== summary") + 1 :]]
    assert [(one[0], one[1]) for one in said] == [("bad", "FAIL"), ("hangs", "FAIL"), ("good", "ok")]
    assert lines[-1].endswith("3 passed in 0.1s") and lines[-2].endswith("stopped after 2 s")
    assert (tmp_path / "out" / "tests.log").read_text().endswith(done.stdout[done.stdout.index("== summary") :])

    done = run("bash bench/hopper/tests.sh", tmp_path / "all", PYTHON=str(python))
    files = re.findall(r"tests/gpu/test_\w+\.py", (tmp_path / "all" / "out" / "tests.log").read_text())
    assert done.returncode == 0 and len(set(files)) == len(files) == 9 and all((ROOT / file).is_file() for file in files)
    assert files[-2:] == ["tests/gpu/test_symm_mem.py", "tests/gpu/test_warm_up_cuda.py"]

    done = run("bash bench/hopper/tests.sh good", tmp_path / "late", PYTHON=str(python), LIMIT="20")
    assert done.returncode == 1 and "no time left" in done.stdout


def test_what_all_scripts_run_under(tmp_path):
    done = run('. bench/hopper/env.sh; echo "$VLLM_ALLREDUCE_USE_SYMM_MEM $TRITON_CACHE_DIR"; [ -d "$TRITON_CACHE_DIR" ]', tmp_path, TRITON_CACHE_DIR="")
    assert done.returncode == 0 and done.stdout == f"0 {tmp_path}/root/triton\n"


def test_a_lost_device_is_tried_again_and_no_other_failure_is(tmp_path):
    text = '. bench/hopper/env.sh; attempt x bash -c \'echo a try; exit "$0"\' {code}; echo "ended with $?"'
    for code, tries in ((3, 3), (1, 1), (0, 1)):
        done = run(text.format(code=code), tmp_path / str(code))
        assert f"ended with {code}" in done.stdout
        assert (tmp_path / str(code) / "out" / "x.log").read_text().count("a try") == tries


def test_a_limit_ends_a_call_and_what_was_there_comes_back(tmp_path):
    text = '. bench/hopper/env.sh; attempt x bash -c \'echo found; while :; do read -t 1 <> <(:); done\'; echo "ended with $?"'
    done = run(text, tmp_path, LIMIT="44")
    assert "ended with 124" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "out" / "x.log").read_text() == "found\n"
