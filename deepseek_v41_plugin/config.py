# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 config.json, validated whole before anything is loaded."""

from dataclasses import dataclass, fields
from typing import Any

from .config_fields import LARGEST, ConfigError, Section, shorten
from .config_layers import LayerPlan, plan_layers
from .config_limits import CEILINGS, LAYERS, TOKENS, check_experts, check_tables
from .config_rules import check_quantization, check_shapes, read_vision, refuse_v4
from .primes import engram_primes

__all__ = ["ConfigError", "LayerPlan", "ModelConfig", "RopeScaling"]


@dataclass(frozen=True)
class RopeScaling:
    """YaRN of the compressed layers; ``factor`` and the betas are unitless, the original
    length counts tokens."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The released fields under their own names, flat, plus what follows from them.

    ``layers`` has one LayerPlan per backbone layer. ``engram_primes`` is
    ``[Engram layer][n-gram order - 2][head]``. ``compress_ratios`` keeps the entries of
    the draft stages at its end. ``candidate_source_layer_id`` is None when no layer
    filters. Without draft stages the ``dspark_*`` fields are 0 or empty; without Engram
    layers the ``engram_*`` fields are.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool
    attention_dropout: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    gate_temp: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    weight_block_size: tuple[int, int]
    vision: dict[str, Any] | None
    layers: tuple[LayerPlan, ...]
    engram_primes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def engram_columns(self) -> int:
        """Table rows that a token reads in one Engram layer: a head each for every order of n-gram."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def last_kv_source(self) -> int | None:
        """The layer behind which nothing is kept of a row but its window KV (v41-facts 10.1)."""
        return max(self.kv_source_layer_ids, default=None)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Parse the nested config.json; raises ConfigError on the first field that is
        missing, mistyped, out of range, unsupported or at odds with another."""
        top = Section(raw)
        refuse_v4(top)
        top.exactly("model_type", "deepseek_v41")
        top.exactly("tie_word_embeddings", False, False)
        text = Section(top.get("text_config"), "text_config")
        got: dict[str, Any] = dict(_scalars(text))
        got.update(_attention(text, got["num_hidden_layers"]))
        got.update(_engram(text, got["num_hidden_layers"], got["vocab_size"]))
        got.update(_dspark(text, got["num_hidden_layers"], got["vocab_size"]))
        for field in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            got[field] = top.integer(field, 0, got["vocab_size"] - 1)
        got["weight_block_size"] = check_quantization(top)
        got["vision"] = read_vision(top)
        got["layers"] = plan_layers(
            text,
            got["compress_ratios"],
            got["kv_source_layer_ids"],
            got["index_source_layer_ids"],
            got["candidate_source_layer_id"],
            got["engram_layer_ids"],
            got["num_hidden_layers"],
            got["num_nextn_predict_layers"],
        )
        check_shapes(text, got)
        check_experts(text, got)
        assert set(got) == {f.name for f in fields(cls)}
        return cls(**got)


_POSITIVE = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads"
    " head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups max_position_embeddings"
    " sliding_window n_routed_experts num_experts_per_tok hc_mult hc_sinkhorn_iters"
    " index_n_heads index_head_dim index_topk candidate_topk_blocks candidate_block_size"
).split()
_ABOVE_ZERO = "swiglu_limit rms_norm_eps hc_eps".split()


def _scalars(text: Section):
    for field in _POSITIVE:
        yield field, text.integer(field, high=CEILINGS.get(field, LARGEST))
    for field in _ABOVE_ZERO:
        yield field, text.number(field, 0.0)
    for field in ("rope_theta", "compress_rope_theta"):
        yield field, text.number(field, 1.0)
    yield "routed_scaling_factor", text.number("routed_scaling_factor", 0.0)
    yield "gate_temp", text.number("gate_temp", 0.0, default=1.0)
    yield "num_key_value_heads", text.exactly("num_key_value_heads", 1)
    yield "n_shared_experts", text.exactly("n_shared_experts", 1)
    yield "hidden_act", text.exactly("hidden_act", "silu")
    yield "attention_bias", text.exactly("attention_bias", False)
    dropout = text.number("attention_dropout", 0.0, strict=False, default=0)
    if dropout:
        raise text.fail("attention_dropout", f"{dropout} is not supported", "only 0 is")
    yield "attention_dropout", dropout
    yield "scoring_func", text.exactly("scoring_func", "sqrtsoftplus")
    yield "topk_method", text.exactly("topk_method", "noaux_tc")
    yield "norm_topk_prob", text.exactly("norm_topk_prob", True)


def _attention(text: Section, layers: int) -> dict[str, Any]:
    rope = Section(text.get("rope_scaling"), text.path("rope_scaling"))
    rope.exactly("rope_type" if "rope_type" in rope.raw else "type", "yarn")
    candidate = text.get("candidate_source_layer_id")
    if candidate is not None:
        candidate = text.integer("candidate_source_layer_id", -1, layers - 1)
    return {
        "rope_scaling": RopeScaling(
            rope.number("factor", 1.0, strict=False),
            rope.number("beta_fast", 1e-6),
            rope.number("beta_slow", 1e-6),
            rope.integer("original_max_position_embeddings", high=TOKENS),
        ),
        "compress_ratios": text.integers("compress_ratios"),
        "kv_source_layer_ids": text.ascending("kv_source_layer_ids", layers),
        "index_source_layer_ids": text.ascending("index_source_layer_ids", layers),
        "candidate_source_layer_id": None if candidate == -1 else candidate,
    }


def _engram(text: Section, layers: int, vocab: int) -> dict[str, Any]:
    got: dict[str, Any] = {"engram_layer_ids": text.ascending("engram_layer_ids", layers)}
    count = len(got["engram_layer_ids"])
    # Without Engram layers the remaining fields may be absent.
    unused = {} if count else {"default": 0}
    low = 1 if count else 0
    got["engram_max_ngram_size"] = text.integer("engram_max_ngram_size", 2 * low, 64, **unused)
    for field, high in (("vocab_size", 1 << 40), ("n_heads", 1024), ("head_dim", 1 << 16)):
        got[f"engram_{field}"] = text.integer(f"engram_{field}", low, high, **unused)
    got["engram_pad_token_id"] = text.integer("engram_pad_token_id", 0, vocab - 1, **unused)
    field = "engram_compressed_vocab_size"
    got[field] = text.integer(field, low, vocab, **unused)
    rows = text.integers("engram_num_embeddings", *([] if count else [()]))
    check_tables(text, count, got["engram_max_ngram_size"], got["engram_n_heads"])
    primes = engram_primes(
        got["engram_vocab_size"], count, got["engram_max_ngram_size"], got["engram_n_heads"]
    )
    sums = tuple(sum(map(sum, layer)) for layer in primes)
    if rows != sums:
        raise text.fail(
            "engram_num_embeddings",
            f"{shorten(list(rows))} is not the sum of the layers' primes",
            f"with these engram_* fields it must be {shorten(list(sums), 200)}",
        )
    return got | {"engram_num_embeddings": rows, "engram_primes": primes}


def _dspark(text: Section, layers: int, vocab: int) -> dict[str, Any]:
    stages = text.integer("num_nextn_predict_layers", 0, LAYERS)
    unused = {} if stages else {"default": 0}
    low = 1 if stages else 0
    got: dict[str, Any] = {"num_nextn_predict_layers": stages}
    for name in ("block_size", "markov_rank", "n_routed_experts", "num_experts_per_tok"):
        field = f"dspark_{name}"
        got[field] = text.integer(field, low, CEILINGS.get(field, LARGEST), **unused)
    got["dspark_noise_token_id"] = text.integer("dspark_noise_token_id", 0, vocab - 1, **unused)
    field = "dspark_target_layer_ids"
    targets = text.ascending(field, layers, *([] if stages else [()]))
    if stages and not targets:
        raise text.fail(field, "is empty", "name the layers whose input the draft reads")
    text.exactly("dspark_target_attn_input", True, True)
    return got | {field: targets}
