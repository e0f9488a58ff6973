# SPDX-License-Identifier: Apache-2.0
"""The tensors that a config calls for: released names, shapes and dtypes."""

from math import prod
from typing import NamedTuple

from ..config import ModelConfig

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}
BLOCK = 32


class TensorSpec(NamedTuple):
    """Shape (row-major, [out, in] for projections) and safetensors dtype name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class _Builder:
    """Collects specs; one method per storage format."""

    def __init__(self):
        self.specs: dict[str, TensorSpec] = {}

    def bf16(self, name: str, *shape: int) -> None:
        self.specs[name] = TensorSpec(shape, "BF16")

    def f32(self, name: str, *shape: int) -> None:
        self.specs[name] = TensorSpec(shape, "F32")

    def fp8(self, name: str, out: int, inner: int) -> None:
        self.specs[f"{name}.weight"] = TensorSpec((out, inner), "F8_E4M3")
        tiles = (-(-out // BLOCK), -(-inner // BLOCK))
        self.specs[f"{name}.scale"] = TensorSpec(tiles, "F8_E8M0")

    def mxfp4(self, name: str, out: int, inner: int) -> None:
        self.specs[f"{name}.weight"] = TensorSpec((out, inner // 2), "I8")
        self.specs[f"{name}.scale"] = TensorSpec((out, inner // BLOCK), "F8_E8M0")


def _block(add: _Builder, cfg: ModelConfig, at: str, experts: int) -> None:
    d, inter, heads = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_attention_heads
    mixes = cfg.hc_mult * (2 + cfg.hc_mult)
    for sub in ("attn", "ffn"):
        add.bf16(f"{at}.{sub}_norm.weight", d)
        add.f32(f"{at}.hc_{sub}_fn", mixes, cfg.hc_mult * d)
        add.f32(f"{at}.hc_{sub}_base", mixes)
        add.f32(f"{at}.hc_{sub}_scale", 3)
    add.fp8(f"{at}.attn.wq_a", cfg.q_lora_rank, d)
    add.bf16(f"{at}.attn.q_norm.weight", cfg.q_lora_rank)
    add.fp8(f"{at}.attn.wq_b", heads * cfg.head_dim, cfg.q_lora_rank)
    add.fp8(f"{at}.attn.wkv", cfg.head_dim, d)
    add.bf16(f"{at}.attn.kv_norm.weight", cfg.head_dim)
    group_in = heads * cfg.head_dim // cfg.o_groups
    add.fp8(f"{at}.attn.wo_a", cfg.o_groups * cfg.o_lora_rank, group_in)
    add.fp8(f"{at}.attn.wo_b", d, cfg.o_groups * cfg.o_lora_rank)
    add.f32(f"{at}.attn.attn_sink", heads)
    add.bf16(f"{at}.ffn.gate.weight", experts, d)
    add.f32(f"{at}.ffn.gate.bias", experts)
    add.f32(f"{at}.ffn.gate.bias_vl", experts)
    for e in range(experts):
        for w, (out, inner) in {"w1": (inter, d), "w2": (d, inter), "w3": (inter, d)}.items():
            add.mxfp4(f"{at}.ffn.experts.{e}.{w}", out, inner)
    for w, (out, inner) in {"w1": (inter, d), "w2": (d, inter), "w3": (inter, d)}.items():
        add.fp8(f"{at}.ffn.shared_experts.{w}", out, inner)


def _sources(add: _Builder, cfg: ModelConfig) -> None:
    for layer in cfg.layers:
        at = f"layers.{layer.index}.attn"
        if layer.is_kv_source:
            add.bf16(f"{at}.compressor.wkv.weight", cfg.head_dim, cfg.hidden_size)
            if layer.ratio > 1:
                add.bf16(f"{at}.compressor.wgate.weight", cfg.head_dim, cfg.hidden_size)
            add.bf16(f"{at}.compressor.norm.weight", cfg.head_dim)
            add.bf16(f"{at}.indexer.wk.weight", cfg.index_head_dim, cfg.head_dim)
            add.bf16(f"{at}.indexer.k_norm.weight", cfg.index_head_dim)
        if layer.is_index_source:
            rows = cfg.index_n_heads * cfg.index_head_dim
            add.fp8(f"{at}.indexer.wq_b", rows, cfg.q_lora_rank)
            add.bf16(f"{at}.indexer.weights_proj.weight", cfg.index_n_heads, cfg.hidden_size)


def _engram(add: _Builder, cfg: ModelConfig) -> None:
    hc, d, width = cfg.hc_mult, cfg.hidden_size, cfg.engram_head_dim
    columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings):
        at = f"layers.{layer}.engram"
        # One scale per row and 32 columns, unlike the 32 x 32 tiles elsewhere.
        add.specs[f"{at}.embed.weight"] = TensorSpec((rows, width), "F8_E4M3")
        add.specs[f"{at}.embed.scale"] = TensorSpec((rows, width // BLOCK), "F8_E8M0")
        add.fp8(f"{at}.wkv", (hc + 1) * d, columns * width)
        add.bf16(f"{at}.q_weight", hc, d)
        add.bf16(f"{at}.k_weight", hc, d)


def _dspark(add: _Builder, cfg: ModelConfig) -> None:
    stages, d = cfg.num_nextn_predict_layers, cfg.hidden_size
    if not stages:
        return
    for stage in range(stages):
        _block(add, cfg, f"mtp.{stage}", cfg.dspark_n_routed_experts)
    add.fp8("mtp.0.main_proj", d, len(cfg.dspark_target_layer_ids) * d)
    add.bf16("mtp.0.main_norm.weight", d)
    last, rank = f"mtp.{stages - 1}", cfg.dspark_markov_rank
    add.bf16(f"{last}.norm.weight", d)
    add.bf16(f"{last}.markov_head.embed.weight", cfg.vocab_size, rank)
    add.bf16(f"{last}.markov_head.head.weight", cfg.vocab_size, rank)
    add.bf16(f"{last}.confidence_head.proj.weight", 1, d + rank)


def _vision(add: _Builder, cfg: ModelConfig) -> None:
    if cfg.vision is None:
        return
    v, d = cfg.vision, cfg.hidden_size
    width, inter = v["hidden_size"], v["intermediate_size"]
    add.bf16("vision.patch_embed.proj.weight", width, 3 * v["patch_size"] ** 2)
    add.bf16("vision.patch_embed.proj.bias", width)
    for n in range(v["num_hidden_layers"]):
        at = f"vision.blocks.{n}"
        add.bf16(f"{at}.norm1.weight", width)
        add.bf16(f"{at}.norm2.weight", width)
        add.bf16(f"{at}.attn.wqkv.weight", 3 * width, width)
        add.bf16(f"{at}.attn.wqkv.bias", 3 * width)
        add.bf16(f"{at}.attn.wo.weight", width, width)
        add.bf16(f"{at}.attn.wo.bias", width)
        add.bf16(f"{at}.mlp.w1.weight", 2 * inter, width)
        add.bf16(f"{at}.mlp.w2.weight", width, inter)
    add.bf16("vision.norm.weight", width)
    add.bf16("aligner.w1.weight", d, width * v["downsample_ratio"] ** 2)
    add.bf16("aligner.w1.bias", d)
    add.bf16("aligner.w2.weight", d, d)
    add.bf16("aligner.w2.bias", d)
    for name in ("image_start", "image_end", "image_newline"):
        add.bf16(name, d)


def expected_tensors(cfg: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint by its stored name.

    Draft stages (``mtp.S.``) and the vision tower are included as far as the config has
    them. For the released config: 96,085 tensors, 510,286,023,000 bytes.
    """
    add = _Builder()
    add.bf16("embed.weight", cfg.vocab_size, cfg.hidden_size)
    for layer in range(cfg.num_hidden_layers):
        _block(add, cfg, f"layers.{layer}", cfg.n_routed_experts)
    _sources(add, cfg)
    _engram(add, cfg)
    add.bf16("norm.weight", cfg.hidden_size)
    add.bf16("head.weight", cfg.vocab_size, cfg.hidden_size)
    _dspark(add, cfg)
    _vision(add, cfg)
    return add.specs
