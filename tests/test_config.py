# SPDX-License-Identifier: Apache-2.0
"""config.json: the released values pass, and each way of being wrong has its message."""

import copy
import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from deepseek_v41_plugin.config import ConfigError, ModelConfig
from deepseek_v41_plugin.primes import is_prime

RELEASED = json.loads((Path(__file__).parent / "data/released_config.json").read_text())
DROP = object()


def changed(**fields):
    """The released config with dotted fields replaced (``__`` for the dot)."""
    raw = copy.deepcopy(RELEASED)
    for path, value in fields.items():
        *parents, last = path.split("__")
        at = raw
        for key in parents:
            at = at[key]
        if value is DROP:
            del at[last]
        else:
            at[last] = value
    return raw


def refused(where, *words, **fields):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(changed(**fields))
    message = str(caught.value)
    assert message.startswith(f"{where}: "), message
    assert "\n" not in message and len(message) < 900
    assert message.count(". ") >= 1, f"no remedy in: {message}"
    for word in words:
        assert word in message, message


@pytest.fixture(scope="module")
def released():
    return ModelConfig.from_hf(RELEASED)


def test_released_fields_keep_their_names_and_values(released):
    for field, value in RELEASED["text_config"].items():
        if field in ("model_type", "rope_scaling"):
            continue
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(released, field) == expected, field
    assert released.rope_scaling.factor == 16
    assert released.rope_scaling.original_max_position_embeddings == 65536
    assert (released.bos_token_id, released.eos_token_id, released.pad_token_id) == (0, 1, 2)
    assert released.image_token_id == 129264
    assert released.weight_block_size == (32, 32)
    assert released.gate_temp == 1.0
    assert released.vision["hidden_size"] == 1024
    with pytest.raises(FrozenInstanceError):
        released.hidden_size = 1


def test_released_layers(released):
    plan = released.layers
    assert [p.index for p in plan] == list(range(40))
    assert [p.ratio for p in plan] == [0] * 2 + [2] * 18 + [1] * 20
    assert [p.index for p in plan if p.is_kv_source] == [2, 8, 14, 20]
    assert [p.index for p in plan if p.is_index_source] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [p.index for p in plan if p.is_candidate_source] == [20]
    assert [p.index for p in plan if p.restricted] == [24, 28, 32, 36]
    assert {p.index: p.engram for p in plan if p.engram is not None} == {1: 0, 14: 1}
    assert (plan[1].kv_source, plan[1].index_source) == (None, None)
    assert (plan[13].kv_source, plan[13].index_source) == (8, 8)
    assert (plan[35].kv_source, plan[35].index_source) == (20, 32)


def test_released_primes(released):
    first, second = released.engram_primes
    assert first[0][:3] == (16000057, 16000079, 16000081)
    assert (second[0][0], second[2][-1]) == (16000477, 16000889)
    sums = tuple(sum(map(sum, layer)) for layer in released.engram_primes)
    assert sums == (384006168, 384016682)


def test_primes_against_trial_division(run_rng):
    sample = list(range(-2, 500)) + [run_rng.randrange(500, 1 << 20) for _ in range(500)]
    for n in sample:
        plain = n >= 2 and all(n % d for d in range(2, int(n**0.5) + 1))
        assert is_prime(n) == plain, n
    # Carmichael numbers and a strong pseudoprime to the bases 2, 3, 5 and 7.
    assert not any(map(is_prime, (561, 41041, 825265, 3215031751)))


def test_extra_keys_and_optional_fields():
    raw = changed(text_config__some_new_key={"a": 1}, text_config__attention_dropout=DROP)
    del raw["vision_config"], raw["tie_word_embeddings"]
    cfg = ModelConfig.from_hf(raw)
    assert cfg.vision is None and cfg.attention_dropout == 0.0
    assert ModelConfig.from_hf(changed(text_config__gate_temp=2)).gate_temp == 2.0
    for absent in (None, -1):
        cfg = ModelConfig.from_hf(changed(text_config__candidate_source_layer_id=absent))
        assert cfg.candidate_source_layer_id is None
        assert not any(p.restricted or p.is_candidate_source for p in cfg.layers)


def test_groups_that_are_off_need_no_fields():
    raw = changed(
        text_config__engram_layer_ids=[],
        text_config__engram_num_embeddings=DROP,
        text_config__engram_vocab_size=DROP,
        text_config__num_nextn_predict_layers=0,
        text_config__compress_ratios=[0, 0] + [2] * 18 + [1] * 20,
        text_config__dspark_block_size=DROP,
        text_config__dspark_target_layer_ids=DROP,
    )
    cfg = ModelConfig.from_hf(raw)
    assert cfg.engram_primes == () and cfg.dspark_target_layer_ids == ()


FIELDS = sorted(RELEASED["text_config"].keys() - {"model_type"})


@pytest.mark.parametrize("field", [f for f in FIELDS if f != "attention_dropout"])
def test_each_text_field_is_required(field):
    refused(f"text_config.{field}", "missing", **{f"text_config__{field}": DROP})


WRONG = [(f, v) for f in FIELDS for v in ("6", True, None, {"a": 1})]
ACCEPTED = (("candidate_source_layer_id", None), ("norm_topk_prob", True))


@pytest.mark.parametrize(("field", "value"), [pair for pair in WRONG if pair not in ACCEPTED])
def test_each_text_field_is_typed(field, value):
    where = f"text_config.{field}"
    if field == "rope_scaling" and isinstance(value, dict):
        where += ".type"
    refused(where, **{f"text_config__{field}": value})


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_size", 0),
        ("hidden_size", 5120.0),
        ("num_hidden_layers", -1),
        ("rms_norm_eps", 0.0),
        ("rope_theta", 1),
        ("compress_rope_theta", 1),
        ("engram_compressed_vocab_size", 0),
        ("num_key_value_heads", 1.0),
        ("n_shared_experts", True),
        ("norm_topk_prob", 1),
        ("attention_dropout", 0.1),
        ("rope_theta", float("nan")),
        ("swiglu_limit", float("inf")),
        ("dspark_noise_token_id", 129280),
        ("engram_pad_token_id", -1),
        ("engram_compressed_vocab_size", 129281),
        ("candidate_source_layer_id", 40),
        ("num_key_value_heads", 2),
        ("n_shared_experts", 0),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("norm_topk_prob", False),
        ("attention_bias", True),
        ("num_experts_per_tok", 385),
        ("dspark_num_experts_per_tok", 129),
        ("dspark_target_layer_ids", []),
        ("dspark_target_layer_ids", [37, 38, 40]),
        ("index_k_source_layer_ids", [2]),
        ("kv_source_layer_ids", [8, 2, 14, 20]),
        ("engram_layer_ids", [1, 1]),
        ("engram_num_embeddings", [384006168, 384016683]),
        ("engram_num_embeddings", [384006168]),
    ],
)
def test_out_of_range(field, value):
    refused(f"text_config.{field}", **{f"text_config__{field}": value})


@pytest.mark.parametrize(
    "field, value, word",
    [
        ("hidden_size", 5136, "32"),
        ("moe_intermediate_size", 2310, "32"),
        ("head_dim", 500, "32"),
        ("q_lora_rank", 1290, "32"),
        ("index_head_dim", 100, "32"),
        ("engram_head_dim", 250, "32"),
        ("qk_rope_head_dim", 63, "2"),
        ("qk_rope_head_dim", 130, "index_head_dim"),
        ("o_groups", 7, "64 heads"),
        ("o_lora_rank", 1022, "32"),
    ],
)
def test_divisibility(field, value, word):
    refused(f"text_config.{field}", word, **{f"text_config__{field}": value})


def test_top_level_and_quantization():
    refused("model_type", "missing", model_type=DROP)
    refused("model_type", "not supported", model_type="llama")
    refused("architectures", "DeepseekV41ForCausalLM", architectures=["LlamaForCausalLM"])
    refused("tie_word_embeddings", tie_word_embeddings=True)
    refused("text_config", "missing", text_config=DROP)
    refused("text_config", "object", text_config=[])
    refused("image_token_id", "range", image_token_id=129280)
    refused("eos_token_id", "integer", eos_token_id=[1])
    refused("quantization_config", "missing", quantization_config=DROP)
    for field, bad in {
        "quant_method": "awq",
        "activation_scheme": "static",
        "scale_fmt": "float",
        "expert_dtype": "fp8",
        "weight_block_size": [128, 128],
    }.items():
        refused(f"quantization_config.{field}", **{f"quantization_config__{field}": bad})
        refused(f"quantization_config.{field}", **{f"quantization_config__{field}": DROP})
    refused("text_config.rope_scaling.factor", text_config__rope_scaling__factor=0.5)
    refused("text_config.rope_scaling.rope_type", text_config__rope_scaling__rope_type="linear")
    refused("vision_config.patch_size", "missing", vision_config__patch_size=DROP)
    refused("vision_config.num_attention_heads", vision_config__num_attention_heads=15)


def test_v4_is_named():
    refused("model_type", "DeepSeek-V4", model_type="deepseek_v4")
    refused("architectures", "DeepSeek-V4", architectures=["DeepseekV4ForCausalLM"])
    refused("text_config.num_hash_layers", "V4", text_config__num_hash_layers=3)
    ratios = [0, 0] + [4, 128] * 19 + [0] * 3
    refused("text_config.compress_ratios", "V4", text_config__compress_ratios=ratios)
    flat = {k: v for k, v in RELEASED.items() if k != "text_config"} | RELEASED["text_config"]
    flat["model_type"] = "deepseek_v41"
    with pytest.raises(ConfigError, match="^text_config: missing.*flat.*V4"):
        ModelConfig.from_hf(flat)


RATIOS = "text_config.compress_ratios"
KV = "text_config.kv_source_layer_ids"
INDEX = "text_config.index_source_layer_ids"
CANDIDATE = "text_config.candidate_source_layer_id"


def test_sources_that_contradict_the_ratios():
    good = RELEASED["text_config"]["compress_ratios"]

    def layers(**fields):
        return {f"text_config__{k}": v for k, v in fields.items()}

    refused(RATIOS, "43 in all", **layers(compress_ratios=good[:-1]))
    refused(RATIOS, "entry 5 is 3", **layers(compress_ratios=good[:5] + [3] + good[6:]))
    refused(RATIOS, "draft", **layers(compress_ratios=good[:-1] + [1]))
    refused(KV, "layer 2 has", **layers(compress_ratios=[0] * 3 + good[3:]))
    refused(KV, "layer 1 has", **layers(compress_ratios=[0, 2] + good[2:]))
    refused(KV, "ratio-1 layer, 9", **layers(compress_ratios=good[:9] + [1] + good[10:]))
    refused(KV, "ratio-1 layer, 20", **layers(kv_source_layer_ids=[2, 8, 14]))
    refused(KV, "layer 2 has", **layers(kv_source_layer_ids=[8, 14, 20]))
    refused(INDEX, "KV source 8", **layers(index_source_layer_ids=[2, 14, 20, 24, 28, 32, 36]))
    refused(INDEX, "layer 0", **layers(index_source_layer_ids=[0, 2, 8, 14, 20]))
    later = good[:30] + [2] + good[31:]
    refused(RATIOS, "layer 30", "KV source 20", **layers(compress_ratios=later))
    refused(CANDIDATE, "layer 21", **layers(candidate_source_layer_id=21))
    refused(CANDIDATE, "KV source 20", **layers(candidate_source_layer_id=14))


def test_a_later_candidate_source_and_inner_window_layers_are_allowed():
    good = RELEASED["text_config"]["compress_ratios"]
    raw = changed(
        text_config__candidate_source_layer_id=28,
        text_config__compress_ratios=good[:25] + [0] + good[26:],
    )
    cfg = ModelConfig.from_hf(raw)
    assert [p.index for p in cfg.layers if p.restricted] == [32, 36]
    assert cfg.layers[25].kv_source is None and cfg.layers[26].index_source == 24


NUMBERS = "swiglu_limit rms_norm_eps rope_theta compress_rope_theta hc_eps gate_temp"
NUMBERS += " routed_scaling_factor attention_dropout"
YARN = "factor beta_fast beta_slow".split()


@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, -(10**400), float("nan"), float("inf")],
    ids=["large", "huge", "low", "nan", "inf"],
)
def test_numbers_are_finite(value):
    for field in NUMBERS.split():
        refused(f"text_config.{field}", "range", **{f"text_config__{field}": value})
    for field in YARN:
        where = f"text_config.rope_scaling.{field}"
        refused(where, "range", **{f"text_config__rope_scaling__{field}": value})
    refused("vision_config.rope_theta", "range", vision_config__rope_theta=value)


INTEGERS = [f for f in FIELDS if type(RELEASED["text_config"][f]) is int]
INTEGERS = sorted({*INTEGERS} - {*NUMBERS.split(), "num_key_value_heads", "n_shared_experts"})


@pytest.mark.parametrize("value", [1 << 63, 10**5000], ids=["int64", "huge"])
def test_counts_have_ceilings(value):
    for field in INTEGERS:
        refused(f"text_config.{field}", "between", **{f"text_config__{field}": value})
    vision = {f for f, v in RELEASED["vision_config"].items() if type(v) is int}
    for field in sorted(vision - {"rope_theta"}):
        refused(f"vision_config.{field}", "must be", **{f"vision_config__{field}": value})
    field = "rope_scaling.original_max_position_embeddings"
    refused(f"text_config.{field}", **{f"text_config__{field.replace('.', '__')}": value})
    refused(RATIOS, "entry 0 is", text_config__compress_ratios=[value] * 43)


@pytest.mark.parametrize(
    "field, most",
    [("num_hidden_layers", 1024), ("n_routed_experts", 65536), ("hc_sinkhorn_iters", 1000)],
)
def test_ceilings_are_named(field, most):
    words = (f"{most + 1} is out of range", f"between 1 and {most}")
    refused(f"text_config.{field}", *words, **{f"text_config__{field}": most + 1})


def test_ceilings_of_products():
    most = {"n_routed_experts": 6553, "dspark_n_routed_experts": 65536}
    assert ModelConfig.from_hf(changed(**{f"text_config__{k}": v for k, v in most.items()}))
    refused("text_config.n_routed_experts", "too many", text_config__n_routed_experts=6554)
    refused("text_config.engram_n_heads", "too many", text_config__engram_n_heads=1024)


def test_shown_values_are_short():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 9999, [1] * 9999, deep, {"a": "b" * 9999}):
        for field in FIELDS:
            where = f"text_config.{field}"
            with pytest.raises(ConfigError, match=f"^{where}") as caught:
                ModelConfig.from_hf(changed(**{f"text_config__{field}": value}))
            assert len(str(caught.value)) < 300
