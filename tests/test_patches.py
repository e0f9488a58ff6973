# SPDX-License-Identifier: Apache-2.0
"""The patches apply to the released vLLM, alone and together, and do there what their own tests say.

The wheel (336 MB) is fetched once, into $DSV41_CACHE or ~/.cache/dsv41.  Only its Python files are used: they import
beside the host that runs the other tests, without the compiled extensions.
"""

import os
import py_compile
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
VERSION = "0.33.0"
each = pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)


def header(patch: Path) -> dict[str, str]:
    """The fields above the diff: a name at the start of a line, continued on indented lines."""
    text = patch.read_text().split("\n---\n", 1)[0]
    return {name: " ".join(value.split()) for name, value in re.findall(r"^([A-Z][A-Za-z-]*):((?:.*\n?)(?:[ \t].*\n?)*)", text, re.MULTILINE)}


def files(patch: Path) -> list[str]:
    return re.findall(r"^diff --git a/(\S+) b/\1$", patch.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def wheel() -> Path:
    cache = Path(os.environ.get("DSV41_CACHE") or Path.home() / ".cache" / "dsv41")
    if not (found := list(cache.glob(f"vllm-{VERSION}-*.whl"))):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as part:
            target = ("--only-binary=:all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64")
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *target, "-d", part, f"vllm=={VERSION}"], capture_output=True, text=True
            )
            assert done.returncode == 0, f"the wheel could not be fetched: {done.stderr}"
            for got in Path(part).glob("*.whl"):  # whole or not at all, also beside another run
                os.replace(got, cache / got.name)
        found = list(cache.glob(f"vllm-{VERSION}-*.whl"))
    return found[0]


def apply(patch: Path, folder: Path) -> None:
    """`git apply`, kept from taking the folder for a part of some repository."""
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name}: {done.stderr}"


def check_compiled(patch: Path, folder: Path) -> None:
    for name in files(patch):
        py_compile.compile(str(folder / name), doraise=True)


def test_the_list_is_complete():
    """Both ways: a patch that the page names but that is gone, and an empty folder, are found."""
    named = re.findall(r"`(\S+\.patch)`", (ROOT / "patches" / "README.md").read_text())
    assert sorted({name for name in named if "*" not in name}) == [patch.name for patch in PATCHES] != []


@each
def test_header_and_list(patch):
    fields = header(patch)
    assert {"Subject", "Applies-to", "Problem", "Change", "Test"} <= {name for name, value in fields.items() if value}
    assert fields["Applies-to"] == f"vLLM {VERSION}"
    tests = [name for name in files(patch) if name.startswith("tests/")]
    assert tests and all(name in fields["Test"] for name in tests)
    assert all(name.startswith(("vllm/", "tests/")) for name in files(patch))


@each
def test_applies_alone(patch, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        here = [name for name in files(patch) if name in archive.namelist()]
        archive.extractall(tmp_path, here)
    before = {name: (tmp_path / name).read_text() for name in here}
    apply(patch, tmp_path)
    assert here and all((tmp_path / name).read_text() != before[name] for name in here)
    check_compiled(patch, tmp_path)


def test_all_together_pass_their_tests(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))])
    for patch in PATCHES:
        apply(patch, tmp_path)
    for patch in PATCHES:
        check_compiled(patch, tmp_path)
    tests = [name for patch in PATCHES for name in files(patch) if name.startswith("tests/")]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "DSV41_CPU_SETUP": "0", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    report = tmp_path / "report.xml"
    options = ("-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--junitxml", str(report))
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = list(xml.parse(report).getroot().iter("testcase"))
    assert {case.get("classname").replace(".", "/") + ".py" for case in cases} == set(tests)
    assert not any(case.find(kind) is not None for case in cases for kind in ("skipped", "failure", "error"))
