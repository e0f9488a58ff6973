# SPDX-License-Identifier: Apache-2.0
"""Launches that must not succeed: one clear error before weights are loaded.

`EngineArgs.create_engine_config` is what `vllm serve` calls first; one case goes through the real
command.
"""

import json
import shutil
import subprocess
import time

import pytest

from tests.e2e.server.harness import user_environment, vllm_command


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    return shutil.copytree(checkpoint, tmp_path / "damaged")


def edit(folder, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def truncate_a_shard(folder) -> str:
    shard = sorted(folder.glob("*.safetensors"))[1]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    return shard.name


def complaint(folder, **options) -> str:
    """The text of the error with which a launch stops."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "block_size": 16, "max_model_len": 512} | options
    with pytest.raises(Exception) as caught:
        EngineArgs(model=str(folder), **options).create_engine_config()
    return str(caught.value)


def test_the_undamaged_one_is_accepted(folder):
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "block_size": 16, "max_model_len": 512}
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    assert config.model_config.architecture == "DeepseekV41ForCausalLM"
    assert config.model_config.enforce_eager, "the plain kernels cannot be captured in graphs"


CONFIGS = {
    "missing field": (lambda c: c["text_config"].pop("index_topk"), "text_config.index_topk"),
    "wrong type": (
        lambda c: c["text_config"].update(hidden_size="big"), "text_config.hidden_size",
    ),
    "V4's architecture": (
        lambda c: c.update(architectures=["DeepseekV4ForCausalLM"]), "architectures",
    ),
    "V4's ratios": (
        lambda c: c["text_config"].update(
            compress_ratios=[{1: 4, 2: 128}.get(r, r) for r in c["text_config"]["compress_ratios"]]
        ),
        "text_config.compress_ratios",
    ),
    "ratios against sources": (
        lambda c: c["text_config"].update(
            kv_source_layer_ids=[2, 4], index_source_layer_ids=[2, 4]
        ),
        "text_config.kv_source_layer_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_config(folder, name):
    change, field = CONFIGS[name]
    edit(folder, change)
    said = complaint(folder)
    assert field + ":" in said and len(said) < 500, said


def test_truncated_shard(folder):
    shard = truncate_a_shard(folder)
    said = complaint(folder)
    assert shard in said and "truncated" in said.lower(), said


def test_missing_tensor(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["layers.3.attn.wkv.weight"]
    (folder / shard).unlink()
    for name in [n for n, s in index["weight_map"].items() if s == shard]:
        del index["weight_map"][name]
    path.write_text(json.dumps(index))
    said = complaint(folder)
    assert "missing" in said and len(said) < 1500, said


OPTIONS = {
    "draft": (
        {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}}, "dspark",
    ),
    "odd blocks": ({"block_size": 17}, "block_size: 17"),
    "small blocks": ({"block_size": 4}, "block_size: 4 is not a multiple of 8"),
    "unknown option": ({"additional_config": {"dsv41": {"exakt": True}}}, "dsv41.exakt"),
    "option's type": ({"additional_config": {"dsv41": {"exact": "yes"}}}, "dsv41.exact"),
    "stages": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    "ranks": ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
    "KV type": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    "LoRA": ({"enable_lora": True}, "enable_lora"),
    "pooling": ({"runner": "pooling"}, "runner: pooling"),
    "embeddings": ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
    "float16": ({"dtype": "float16"}, "dtype: torch.float16"),
    "context ranks": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode_context_parallel_size",
    ),
    "microbatches": ({"enable_dbo": True}, "enable_dbo"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(folder, name):
    options, named = OPTIONS[name]
    said = complaint(folder, **options)
    assert named in said and len(said) < 500, said


def test_model_runner_v1(folder, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "model runner: V1 keeps no token history" in complaint(folder)


def test_command_line(folder):
    """Through `vllm serve`: a failing exit code, the reason as a line, no weights read."""
    shard = truncate_a_shard(folder)
    start = time.monotonic()
    done = subprocess.run(
        vllm_command(str(folder), "--port", "0", "--max-model-len", "512"),
        capture_output=True, text=True, env=user_environment(), timeout=200,
    )  # fmt: skip
    said = done.stdout + done.stderr
    lines = [line for line in said.splitlines() if shard in line]
    assert done.returncode not in (0, None) and time.monotonic() - start < 120
    assert lines and "truncated" in lines[-1].lower(), said[-2000:]
    for later in ("EngineCore", "Loading weights", "Starting vLLM"):
        assert later not in said, later
