# SPDX-License-Identifier: Apache-2.0
"""Rules that span several fields of config.json."""

from typing import Any

from .config_fields import LARGEST, ConfigError, Section, shorten
from .config_limits import VISION_CEILINGS

BLOCK = 32
_V4_REMEDY = (
    "this package serves DeepSeek-V4.1 (model_type deepseek_v41) only; serve V4 with the"
    " engine's own model"
)
_VISION_INTS = (
    "num_hidden_layers hidden_size num_attention_heads intermediate_size patch_size"
    " downsample_ratio max_image_tokens min_pixels"
).split()


def refuse_v4(top: Section) -> None:
    """Raise ConfigError for a DeepSeek-V4 config or the flat layout."""
    kind = top.get("model_type")
    names = top.raw.get("architectures", ["DeepseekV41ForCausalLM"])
    if not isinstance(names, (list, tuple)):
        raise top.fail("architectures", f"expected a list, got {shorten(names)}", "use a list")
    if kind == "deepseek_v4" or "DeepseekV4ForCausalLM" in names:
        field = "model_type" if kind == "deepseek_v4" else "architectures"
        raise top.fail(field, "this is a DeepSeek-V4 config", _V4_REMEDY)
    nested = top.raw.get("text_config")
    for where, raw in (("", top.raw), ("text_config.", nested)):
        if isinstance(raw, dict) and raw.get("num_hash_layers"):
            raise ConfigError(
                f"{where}num_hash_layers", "hash-routed layers exist in V4 only", _V4_REMEDY
            )
    if nested is None and "hidden_size" in top.raw:
        raise top.fail(
            "text_config",
            "missing, the fields lie flat at the top level as in DeepSeek-V4",
            "nest them under text_config as in the released V4.1 config.json",
        )
    if "DeepseekV41ForCausalLM" not in names:
        raise top.fail(
            "architectures",
            f"{shorten(names)} lacks DeepseekV41ForCausalLM",
            "set it to ['DeepseekV41ForCausalLM']",
        )


def check_quantization(top: Section) -> tuple[int, int]:
    """The weight block (rows, columns); raises ConfigError unless fp8 / ue8m0 / fp4."""
    quant = Section(top.get("quantization_config"), "quantization_config")
    quant.exactly("quant_method", "fp8")
    quant.exactly("activation_scheme", "dynamic")
    quant.exactly("scale_fmt", "ue8m0")
    quant.exactly("expert_dtype", "fp4")
    block = quant.integers("weight_block_size")
    if block != (BLOCK, BLOCK):
        raise quant.fail(
            "weight_block_size",
            f"{shorten(list(block))} is not supported",
            f"V4.1 stores one scale per [{BLOCK}, {BLOCK}] tile",
        )
    return BLOCK, BLOCK


def read_vision(top: Section) -> dict[str, Any] | None:
    """The vision_config as a dict, or None for a text-only checkpoint."""
    raw = top.raw.get("vision_config")
    if raw is None or (isinstance(raw, dict) and raw.get("num_hidden_layers") == 0):
        return None
    vision = Section(raw, "vision_config")
    got = {
        field: vision.integer(field, high=VISION_CEILINGS.get(field, LARGEST))
        for field in _VISION_INTS
    }
    if got["hidden_size"] % got["num_attention_heads"]:
        raise vision.fail(
            "num_attention_heads",
            f"{got['num_attention_heads']} heads do not divide hidden_size {got['hidden_size']}",
            "use a divisor",
        )
    if raw.get("rope_theta") is not None:
        vision.number("rope_theta", 1.0)
    return dict(raw) | got


def check_shapes(text: Section, got: dict[str, Any]) -> None:
    """Divisibility and ordering between the sizes in ``got``; raises ConfigError."""
    for field in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank"):
        text.multiple(field, got[field], BLOCK, "the 32-wide scale blocks")
    text.multiple("index_head_dim", got["index_head_dim"], BLOCK, "the 32-wide FP4 groups")
    text.multiple("qk_rope_head_dim", got["qk_rope_head_dim"], 2, "pairwise rotation")
    if got["engram_layer_ids"]:
        text.multiple("engram_head_dim", got["engram_head_dim"], BLOCK, "the 32-wide scales")
    for field in ("head_dim", "index_head_dim"):
        if got["qk_rope_head_dim"] > got[field]:
            raise text.fail(
                "qk_rope_head_dim",
                f"{got['qk_rope_head_dim']} exceeds {field} {got[field]}",
                "the rotated part is the tail of a head: make it smaller",
            )
    if got["num_attention_heads"] % got["o_groups"]:
        raise text.fail(
            "o_groups",
            f"{got['o_groups']} groups do not divide {got['num_attention_heads']} heads",
            "use a divisor of num_attention_heads",
        )
    if got["o_groups"] * got["o_lora_rank"] % BLOCK:
        raise text.fail(
            "o_lora_rank",
            f"o_groups * o_lora_rank = {got['o_groups'] * got['o_lora_rank']} is not a multiple"
            f" of {BLOCK}",
            "the 32-wide scale blocks of wo_b need that",
        )
    for prefix, total in (("", "n_routed_experts"), ("dspark_", "dspark_n_routed_experts")):
        field = f"{prefix}num_experts_per_tok"
        if got[field] > got[total]:
            raise text.fail(
                field,
                f"{got[field]} exceeds {total} {got[total]}",
                "choose at most as many experts as there are",
            )
    if got["rope_scaling"].original_max_position_embeddings > got["max_position_embeddings"]:
        raise text.fail(
            "rope_scaling.original_max_position_embeddings",
            "exceeds max_position_embeddings",
            "YaRN extends a shorter original length",
        )
