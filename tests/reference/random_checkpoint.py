# SPDX-License-Identifier: Apache-2.0
"""Writes a small random checkpoint in the released layout, for the reference's own tests.

It takes nothing from the package; text backbone only (no drafts, no vision).
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT_CONFIG = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 8, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "rms_norm_eps": 1e-20,
    "swiglu_limit": 10.0, "max_position_embeddings": 256, "rope_theta": 10000,
    "compress_rope_theta": 160000, "sliding_window": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0], "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7], "index_n_heads": 4, "index_head_dim": 32,
    "index_topk": 4, "candidate_source_layer_id": 5, "candidate_topk_blocks": 4,
    "candidate_block_size": 2, "engram_layer_ids": [1, 4], "engram_num_embeddings": [630, 834],
    "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32,
    "engram_vocab_size": 97, "engram_compressed_vocab_size": 512, "engram_pad_token_id": 2,
}  # fmt: skip


def tokenizer() -> Tokenizer:
    """Byte level, 256 bytes after three special tokens, a few words to make classes collide."""
    words = ["<bos>", "<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += ["The", "the", "ĠThe", "Ġthe", "THE", "ĠĠ"]
    t = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(words[:3])
    return t


class _Random:
    def __init__(self, seed: int):
        self.g, self.tensors = torch.Generator().manual_seed(seed), {}

    def normal(self, *shape, std=1.0, mean=0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.g) * std + mean

    def bf16(self, name, *shape, std=1.0, mean=0.0):
        self.tensors[name] = self.normal(*shape, std=std, mean=mean).to(torch.bfloat16)

    def f32(self, name, *shape, std=1.0, mean=0.0):
        self.tensors[name] = self.normal(*shape, std=std, mean=mean)

    def norm(self, name, *shape):
        self.bf16(f"{name}.weight", *shape, std=0.1, mean=1.0)

    def e8m0(self, name, *shape, centre: int):
        raw = torch.randint(centre - 1, centre + 2, shape, generator=self.g, dtype=torch.uint8)
        self.tensors[name] = raw.view(torch.float8_e8m0fnu)

    def fp8(self, prefix, out, width, gain=1.0, tile=(32, 32)):
        """Entries of about gain / sqrt(width); a scale is 2**-7, its half or its double."""
        w = self.normal(out, width, std=128 * gain * width**-0.5).clamp(-448, 448)
        self.tensors[f"{prefix}.weight"] = w.to(torch.float8_e4m3fn)
        self.e8m0(f"{prefix}.scale", -(-out // tile[0]), -(-width // tile[1]), centre=127 - 7)

    def mxfp4(self, prefix, out, width):
        codes = torch.randint(-128, 128, (out, width // 2), generator=self.g, dtype=torch.int8)
        self.tensors[f"{prefix}.weight"] = codes
        self.e8m0(f"{prefix}.scale", out, width // 32, centre=127 - 5)


def write(directory: Path, seed: int = 0, **overrides) -> Path:
    """Config (``overrides`` of text_config), two shards and the tokenizer; returns directory."""
    c = {**TEXT_CONFIG, **overrides}
    r, D, hc, dh = _Random(seed), c["hidden_size"], c["hc_mult"], c["head_dim"]
    heads, lora, inter = c["num_attention_heads"], c["q_lora_rank"], c["moe_intermediate_size"]
    mixes = (2 + hc) * hc
    r.bf16("embed.weight", c["vocab_size"], D)
    r.norm("norm", D)
    r.bf16("head.weight", c["vocab_size"], D, std=D**-0.5)
    for i in range(c["num_hidden_layers"]):
        p, ratio = f"layers.{i}", c["compress_ratios"][i]
        for kind in ("attn", "ffn"):
            r.norm(f"{p}.{kind}_norm", D)
            r.f32(f"{p}.hc_{kind}_fn", mixes, hc * D, std=(hc * D) ** -0.5)
            r.f32(f"{p}.hc_{kind}_base", mixes, std=0.5)
            r.f32(f"{p}.hc_{kind}_scale", 3, std=0.1, mean=0.7)
        a = f"{p}.attn"
        r.fp8(f"{a}.wq_a", lora, D)
        r.norm(f"{a}.q_norm", lora)
        r.fp8(f"{a}.wq_b", heads * dh, lora)
        r.fp8(f"{a}.wkv", dh, D)
        r.norm(f"{a}.kv_norm", dh)
        r.fp8(f"{a}.wo_a", c["o_groups"] * c["o_lora_rank"], heads * dh // c["o_groups"])
        r.fp8(f"{a}.wo_b", D, c["o_groups"] * c["o_lora_rank"])
        r.f32(f"{a}.attn_sink", heads)
        if i in c["kv_source_layer_ids"]:
            r.bf16(f"{a}.compressor.wkv.weight", dh, D, std=D**-0.5)
            if ratio == 2:
                r.bf16(f"{a}.compressor.wgate.weight", dh, D, std=D**-0.5)
            r.norm(f"{a}.compressor.norm", dh)
            r.bf16(f"{a}.indexer.wk.weight", c["index_head_dim"], dh, std=dh**-0.5)
            r.norm(f"{a}.indexer.k_norm", c["index_head_dim"])
        if i in c["index_source_layer_ids"]:
            r.fp8(f"{a}.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], lora)
            r.bf16(f"{a}.indexer.weights_proj.weight", c["index_n_heads"], D, std=D**-0.5)
        f = f"{p}.ffn"
        r.bf16(f"{f}.gate.weight", c["n_routed_experts"], D, std=D**-0.5)
        r.f32(f"{f}.gate.bias", c["n_routed_experts"], std=0.2)
        r.f32(f"{f}.gate.bias_vl", c["n_routed_experts"], std=0.2)
        for e in range(c["n_routed_experts"]):
            for name, shape in (("w1", (inter, D)), ("w3", (inter, D)), ("w2", (D, inter))):
                r.mxfp4(f"{f}.experts.{e}.{name}", *shape)
        for name, shape in (("w1", (inter, D)), ("w3", (inter, D)), ("w2", (D, inter))):
            r.fp8(f"{f}.shared_experts.{name}", *shape)
        if i in c["engram_layer_ids"]:
            rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(i)]
            columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
            table = r.normal(rows, c["engram_head_dim"], std=100.0).clamp(-448, 448)
            r.tensors[f"{p}.engram.embed.weight"] = table.to(torch.float8_e4m3fn)
            r.e8m0(f"{p}.engram.embed.scale", rows, c["engram_head_dim"] // 32, centre=127 - 7)
            r.fp8(f"{p}.engram.wkv", (hc + 1) * D, columns)
            r.bf16(f"{p}.engram.q_weight", hc, D, std=0.1, mean=1.0)
            r.bf16(f"{p}.engram.k_weight", hc, D, std=0.1, mean=1.0)
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(r.tensors)
    for shard, part in enumerate((names[::2], names[1::2])):
        save_file({n: r.tensors[n] for n in part}, directory / f"model-{shard}.safetensors")
    config = {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
        "image_token_id": 511, "text_config": c,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory
