# SPDX-License-Identifier: Apache-2.0
"""What cannot be served: one line that names the field and the remedy, before anything is built."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.engine.harness import EXACT

INDEX = "model.safetensors.index.json"
BALANCED = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
DRAFTED = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}}


@pytest.fixture
def start(monkeypatch, checkpoint):
    """start(**options) builds an engine; getting as far as its core fails the test."""
    from vllm import LLM
    from vllm.v1.engine.core import EngineCore

    def too_late(*_, **__):
        pytest.fail("the engine core was started")

    monkeypatch.setattr(EngineCore, "__init__", too_late)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return lambda **options: LLM(**EXACT | {"model": str(checkpoint)} | options)


def refused(start, **options) -> str:
    with pytest.raises(Exception) as caught:
        start(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: stages are not supported"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: 3 does not divide num_attention_heads = 4"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size: 4 does not divide o_groups = 2"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode_context_parallel_size: "),
        ({"enable_dbo": True}, "enable_dbo: microbatches are not supported"),
        ({"block_size": 15}, "block_size: 15 is not a multiple of 8. Use 16 or more"),
        ({"block_size": 4}, "block_size: 4 is not a multiple of 8"),
        ({"dtype": "float16"}, "dtype: torch.float16 has too little range. Use bfloat16 or float32"),
        ({"runner": "pooling"}, "runner: pooling is not supported. Use generate"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds: Engram needs token ids"),
        (
            {"speculative_config": {"method": "dspark", "num_speculative_tokens": 4}},
            "num_speculative_tokens: 4 is more than the 3 tokens of a draft block. Use 3 or fewer",
        ),
        (
            {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3, "enable_adaptive_verification": True}},
            "dsv41.verify_profile: ",
        ),
        (
            {"swa_bounded_replay": True, "additional_config": {"dsv41": {"keep_tokens": 8}}},
            "dsv41.keep_tokens: 8 is too few. Keep at least 9",
        ),
        ({"additional_config": {"dsv41": {"decoder_replay": "on"}}}, "dsv41.decoder_replay: 'on' is not a mode"),
        ({"additional_config": {"dsv41": {"decoder_replay": "mask"}}}, "dsv41.decoder_replay: 'mask' leaves most of a prompt"),
        ({"quantization": "fp8"}, "quantization: fp8 cannot be applied"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: fp8 is not supported. "),
        ({"enable_lora": True}, "enable_lora: LoRA is not supported"),
        ({"load_format": "pt"}, "load_format: pt is not supported. Use auto"),
        ({"additional_config": {"dsv41": {"exakt": True}}}, "additional_config.dsv41.exakt: unknown option. Known: "),
        ({"additional_config": {"dsv41": {"exact": 1}}}, "additional_config.dsv41.exact: 1 is not a boolean"),
        ({"additional_config": {"dsv41": "exact"}}, "additional_config.dsv41: 'exact' is not a mapping"),
        (
            BALANCED | {"eplb_config": {"num_redundant_experts": 3}},
            "eplb_config.num_redundant_experts: n_routed_experts = 8 and 3 redundant cannot be cut over 2 ranks. Use 2 or 4",
        ),
        (
            BALANCED | DRAFTED | {"additional_config": {"dsv41": {"draft_eplb_config": {"num_redundant_experts": 1}}}},
            "draft_eplb_config.num_redundant_experts: dspark_n_routed_experts = 4 and 1 redundant cannot be cut over 2 ranks. Use 0 or 2",
        ),
        (
            BALANCED | DRAFTED | {"additional_config": {"dsv41": {"draft_eplb_config": {"window": 1}}}},
            "draft_eplb_config.window: unknown option. Known: num_redundant_experts, step_interval, window_size",
        ),
        ({"additional_config": {"dsv41": {"draft_eplb_config": {"step_interval": 9}}}}, "draft_eplb_config: experts are not balanced. Add --enable-eplb"),
        ({"additional_config": {"dsv41": {"eplb_record": "loads.npz"}}}, "eplb_record: experts are not balanced. Add --enable-eplb"),
        (BALANCED | {"additional_config": {"dsv41": {"draft_eplb_config": {"window_size": 0}}}}, "draft_eplb_config.window_size: 0 is not an integer of at least 1"),
        (BALANCED | {"additional_config": {"dsv41": {"draft_eplb_config": {"window_size": 2}}}}, "draft_eplb_config: there is no draft. Add --speculative-config"),
        (BALANCED | {"additional_config": {"dsv41": {"eplb_record": "/no/such/loads.npz"}}}, "eplb_record: the folder of '/no/such/loads.npz' does not exist"),
        (BALANCED | {"additional_config": {"dsv41": {"eplb_slack": 0.1, "eplb_policy": "place"}}}, "eplb_slack: place moves as it likes"),
        (BALANCED | {"additional_config": {"dsv41": {"batch_invariant": True}}}, "enable_eplb: an expert that moves changes the order of a sum"),
        (BALANCED | {"additional_config": {"dsv41": {"eplb_transport": "nccl"}}}, "dsv41.eplb_transport: 'nccl' is not a transport. Use auto, symm_mem or shm"),
        (BALANCED | {"additional_config": {"dsv41": {"eplb_transport": "symm_mem"}}}, "dsv41.eplb_transport: symm_mem "),
        (BALANCED | {"additional_config": {"dsv41": {"eplb_record": "loads"}}}, "dsv41.eplb_record: 'loads' does not end with .npz"),
        (BALANCED | {"expert_placement_strategy": "round_robin"}, "expert_placement_strategy: round_robin is not supported. Use linear"),
        ({"enable_eplb": True}, "enable_expert_parallel must be True"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options(start, options, message):
    assert message in refused(start, **options)


def test_model_runner_v1(start, monkeypatch):
    # Set where vLLM reads it: a running engine has made it remember the environment.
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", False)
    assert "model runner: V1 keeps no token history for Engram" in refused(start)


def test_the_undamaged_one_is_accepted_and_runs_eagerly(checkpoint):
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(checkpoint), block_size=16, max_model_len=512).create_engine_config()
    assert config.model_config.architecture == "DeepseekV41ForCausalLM"
    assert config.model_config.enforce_eager, "a CPU has no graphs"


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text.pop("q_lora_rank"), "text_config.q_lora_rank: "),
        (lambda text: text.update(hidden_size="128"), "text_config.hidden_size: "),
        (lambda text: text.update(num_hash_layers=3), "text_config.num_hash_layers: hash-routed layers exist in V4 only"),
        (lambda text: text.update(compress_ratios=[0, 0, 4, 4, 4, 128, 1, 1, 0, 0]), "text_config.compress_ratios"),
        (lambda text: text.update(kv_source_layer_ids=[4, 5]), "text_config."),
    ],
    ids=["missing", "type", "V4", "ratio", "sources"],
)
def test_config(start, copy, change, message):
    edit(copy / "config.json", lambda config: change(config["text_config"]))
    assert message in refused(start, model=str(copy))


def test_v4_architecture(start, copy):
    edit(copy / "config.json", lambda config: config.update(architectures=["DeepseekV4ForCausalLM"]))
    assert "architectures: " in refused(start, model=str(copy))


def test_wrong_tokenizer(start, copy):
    def shrink(content):
        content["added_tokens"], content["model"]["vocab"] = [], {"a": 0, "b": 1}

    edit(copy / "tokenizer.json", shrink)
    said = refused(start, model=str(copy))
    assert "tokenizer.json: " in said and "engram_compressed_vocab_size" in said


def test_missing_tensor(start, copy):
    edit(copy / INDEX, lambda index: index["weight_map"].pop("layers.3.attn.wkv.weight"))
    assert "layers.3.attn.wkv.weight" in refused(start, model=str(copy))


def test_truncated_shard(start, copy):
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shard.name in refused(start, model=str(copy))
