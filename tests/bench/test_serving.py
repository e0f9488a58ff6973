# SPDX-License-Identifier: Apache-2.0
"""bench/serving.py: its server's processes get the timed weights, and a server that does not start is a row."""

import argparse
import csv
import json
import subprocess
import sys

import pytest
from serving import environment, options, server

LOADED = """
import vllm.plugins
vllm.plugins.load_general_plugins()
from vllm.model_executor.model_loader import dummy_loader
print("PATCHED", dummy_loader.DummyModelLoader.load_weights.__qualname__)
"""


def test_every_process_of_the_server_fills_weights_as_steps_does(tmp_path):
    env = environment(tmp_path, "plugin")
    done = subprocess.run([sys.executable, "-c", LOADED], env=env, capture_output=True, text=True, timeout=300)
    assert "PATCHED patch_dummy_weights.<locals>.load_weights" in done.stdout, done.stdout + done.stderr


def test_options_are_vllms():
    args = argparse.Namespace(device="cuda", impl="host", concurrency=[1, 64], kv_gib=2, memory=0.9, drafts=5, accepted=3.5)
    found = options(args, 4096)
    assert "--language-model-only" in found and found[found.index("--max-num-seqs") + 1] == "64"
    assert json.loads(found[found.index("--speculative-config") + 1])["synthetic_acceptance_length"] == 3.5


def test_a_server_that_ends_says_why(tmp_path):
    command = [sys.executable, "-c", "print('no such device'); raise SystemExit(7)"]
    with pytest.raises(RuntimeError, match="ended with 7: no such device"):
        with server(command, {}, "http://127.0.0.1:9", tmp_path / "log", 60):
            raise AssertionError("it answered")


def test_no_server_is_a_row_for_each_concurrency(bench, tmp_path):
    path = tmp_path / "serving.csv"
    bench("serving.py", "--impl", "plugin", "--device", "cpu", "--concurrency", "1", "3", "--memory", "7", "--csv", str(path))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == ["serve-x1", "serve-x3"] and all(row["status"].startswith("no server") for row in rows)
