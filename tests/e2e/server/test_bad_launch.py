# SPDX-License-Identifier: Apache-2.0
"""A launch that must not succeed, through the real command; the others are in e2e/engine/test_refusals.py."""

import shutil
import subprocess

from tests.e2e.server.harness import user_environment, vllm_command


def test_command_line(checkpoint, tmp_path):
    """Through `vllm serve`: a failing exit code, the reason as a line, no weights read."""
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    shard = sorted(folder.glob("*.safetensors"))[1]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    done = subprocess.run(
        vllm_command(str(folder), "--port", "0", "--max-model-len", "512"),
        capture_output=True, text=True, env=user_environment(), timeout=600,
    )  # fmt: skip
    said = done.stdout + done.stderr
    lines = [line for line in said.splitlines() if shard.name in line]
    assert done.returncode != 0
    assert lines and "truncated" in lines[-1].lower(), said[-2000:]
    for later in ("EngineCore", "Loading weights", "Starting vLLM"):
        assert later not in said, later
