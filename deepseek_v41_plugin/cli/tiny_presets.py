# SPDX-License-Identifier: Apache-2.0
"""Config files of small models in which every structural feature is alive."""

from typing import Any

from ..primes import engram_primes

_COMMON = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hidden_layers": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "candidate_source_layer_id": 5,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 2,
    "engram_vocab_size": 97,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
# Head, RoPE, index, window and top-k sizes are those that Hopper's attention kernels take.
_SM90 = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_lora_rank": 128,
    "o_groups": 8,
    "max_position_embeddings": 1048576,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_vocab_size": 997,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 16,
    "dspark_num_experts_per_tok": 3,
}
_YARN = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}
_ROPE = {
    "tiny": {"factor": 4, "original_max_position_embeddings": 1024},
    "sm90": {"factor": 16, "original_max_position_embeddings": 65536},
}
_VISION = {
    "tiny": {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96},
    "sm90": {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256},
}
PRESETS = {"tiny": _TINY, "sm90": _SM90}
SHARD_MIB = {"tiny": 1, "sm90": 64}


def _resize(text: dict[str, Any], layers: int) -> None:
    """Cut the backbone to ``layers``, or lengthen it by readers of the last sources."""
    ratios = text["compress_ratios"]
    text["compress_ratios"] = (ratios + [ratios[-1]] * layers)[:layers]
    text["num_hidden_layers"] = layers
    for field in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        text[field] = [layer for layer in text[field] if layer < layers]
    if text["candidate_source_layer_id"] >= layers:
        text["candidate_source_layer_id"] = None


def make_config(
    preset: str,
    layers: int | None,
    vision: bool,
    tokens: dict[str, int],
    classes: int,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A config.json in the released layout; ``classes`` counts the tokenizer's folded ids.

    ``overrides`` of text_config count before derived fields are computed and win over them.
    """
    overrides = overrides or {}
    text = {k: list(v) if isinstance(v, list) else v for k, v in _COMMON.items()}
    text |= PRESETS[preset] | overrides
    if layers is not None:
        _resize(text, layers)
    stages = text["num_nextn_predict_layers"]
    last = text["num_hidden_layers"]
    text["compress_ratios"] = text["compress_ratios"] + [0] * stages
    text["rope_scaling"] = _YARN | _ROPE[preset]
    primes = engram_primes(
        text["engram_vocab_size"],
        len(text["engram_layer_ids"]),
        text["engram_max_ngram_size"],
        text["engram_n_heads"],
    )
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    text["engram_compressed_vocab_size"] = classes
    text["dspark_noise_token_id"] = tokens["noise"]
    text["dspark_target_layer_ids"] = list(range(max(0, last - stages), last))
    text |= overrides
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": tokens["bos"],
        "eos_token_id": tokens["eos"],
        "pad_token_id": tokens["pad"],
        "image_token_id": tokens["image"],
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    if vision:
        config["vision_config"] = {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 2,
            "patch_size": 14,
            "rope_theta": 10000,
            "downsample_ratio": 3,
            "max_image_tokens": 64,
            "min_pixels": 3528,
            "max_wh_ratio": None,
        } | _VISION[preset]
    return config
