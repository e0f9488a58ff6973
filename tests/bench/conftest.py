# SPDX-License-Identifier: Apache-2.0
"""The benches are scripts beside the package: tests import their parts and start them as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))


@pytest.fixture
def bench():
    """Runs a script of bench/ (or a text of Python beside them); its output, after it ended well."""

    def run(script: str, *args: str, code: str | None = None) -> str:
        command = [sys.executable, *(["-c", code] if code else [str(BENCH / script)]), *args]
        # A fixed commit: rows of another one are measured again.
        env = {**os.environ, "PYTHONPATH": str(BENCH), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "DSV41_COMMIT": "test"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout

    return run
