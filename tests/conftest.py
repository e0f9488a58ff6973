# SPDX-License-Identifier: Apache-2.0
"""The seed of a run: fresh each time, printed, and settable so that a failure can be repeated."""

import os
import random
import secrets

import pytest

# Tensors here are tiny: threads only wait for each other.  Servers choose for themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SEED = int(os.environ.get("DSV41_TEST_SEED") or secrets.randbelow(1 << 31))


def pytest_report_header():
    return f"DSV41_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"To repeat the random inputs of this run: DSV41_TEST_SEED={SEED}")


def pytest_configure(config):
    """The processes of pytest-xdist draw from one seed."""
    os.environ["DSV41_TEST_SEED"] = str(SEED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One process for each file, whose fixtures are its own, and one for all files that share the server.

    pytest-xdist's own groups are names behind a test's id, which pytest 9.2 does not let it change.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "server" if "e2e/server/" in file else file

    return ByFile(config, log)


@pytest.fixture(scope="session")
def run_seed() -> int:
    return SEED


@pytest.fixture
def run_rng(request) -> random.Random:
    """Random numbers of this test alone: the same ones whichever other tests run."""
    return random.Random(f"{SEED} {request.node.name}")
