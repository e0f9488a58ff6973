# SPDX-License-Identifier: Apache-2.0
"""`dsv41 doctor` as a user runs it: what it says and how it exits."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from deepseek_v41_plugin.cli.doctor import size_text
from deepseek_v41_plugin.cli.tiny import write_tiny



def doctor(*args: str, **env: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "deepseek_v41_plugin.cli.main", "doctor", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **env})
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory, run_seed):
    return write_tiny(tmp_path_factory.mktemp("doctor") / "tiny", preset="tiny", seed=run_seed)


def test_a_model_that_can_be_served(model):
    code, text = doctor(str(model), DSV41_IMPL="plugin")
    assert code == 0, text
    assert "the plugin serves" in text and "806 tensors in" in text
    for op in ("fp8_linear", "attend", "moe_experts", "index_select", "engram_gate", "mhc_turn"):
        assert f"op {op}" in text
    assert "EPLB transport         shm" in text and "not symm_mem: " in text
    assert "BAD" not in text and text.rstrip().endswith("can be served as asked")


def test_problems_are_named_and_end_with_1(model):
    shard = next(model.glob("model-00002*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    try:
        code, text = doctor(str(model), DSV41_OP_MOE_ROUTE="cuda", DSV41_IMPL="plugin")
    finally:
        shard.write_bytes(whole)
    assert code == 1
    assert f"checkpoint             " in text and shard.name in text
    assert "DSV41_OP_MOE_ROUTE=cuda: no such implementation" in text
    assert "could NOT be served as asked" in text


def test_config_parallel_size_and_choice(model, tmp_path):
    assert "3 does not divide num_attention_heads = 4" in doctor(str(model), "--tensor-parallel-size", "3")[1]
    config = json.loads((model / "config.json").read_text())
    del config["text_config"]["index_topk"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = doctor(str(tmp_path), DSV41_IMPL="both")
    assert code == 1 and "text_config.index_topk" in text and "DSV41_IMPL: 'both' is not a choice" in text


def test_what_would_not_serve_is_said(model, tmp_path):
    shutil.copytree(model, tmp_path / "other")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"], tokenizer["model"]["vocab"] = [], {"a": 0, "b": 1, "c": 2}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, text = doctor(str(tmp_path / "other"), VLLM_PLUGINS="dsv41_cpu", VLLM_USE_V2_MODEL_RUNNER="0")
    assert code == 1
    assert "classes of tokens, the config's text_config.engram_compressed_vocab_size" in text
    assert "'dsv41_cpu' leaves dsv41 out" in text
    assert "VLLM_USE_V2_MODEL_RUNNER asks for V1" in text
    code, text = doctor(DSV41_IMPL="host")
    assert code == 1 and "has no CPU path for V4.1" in text


def test_sizes_for_people():
    assert [size_text(x) for x in (5, 2048, 3 << 20, 40.6e9, 5 << 40)] == ["5.0 B", "2.0 KiB", "3.0 MiB", "37.8 GiB", "5120.0 GiB"]
