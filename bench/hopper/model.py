# SPDX-License-Identifier: Apache-2.0
"""The model that is timed: released sizes in a few layers, and dummy weights under which routing stays even."""

from __future__ import annotations

import json
from pathlib import Path

import torch

# Ratios 0 and 2 and 1, two KV sources, three index sources of which the last reads the candidates of the second; no Engram.
LAYERS = {
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0], "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4, "engram_layer_ids": [], "engram_num_embeddings": [], "num_nextn_predict_layers": 3,
}
# What `dsv41 tiny`'s sm90 preset has smaller than the release.
REAL = {
    "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "q_lora_rank": 1280, "o_lora_rank": 1024,
    "n_routed_experts": 384, "dspark_n_routed_experts": 128,
}
E8M0 = 120  # 2^-7: with random nibbles or E4M3 bytes below, a product over 5120 inputs neither grows nor vanishes


def write_model(folder: Path, small: bool) -> None:
    """config.json and a tokenizer into `folder`; small: the tiny preset's sizes, for a CPU."""
    from deepseek_v41_plugin.cli import tiny_tokenizer as words
    from deepseek_v41_plugin.cli.tiny_presets import make_config

    vocab = words.write_tokenizer(folder, 512, 1 << 20)
    named = {"bos": words.BOS, "eos": words.EOS, "pad": words.PAD, "image": words.IMAGE, "noise": words.NOISE}
    ids = {key: vocab[token] for key, token in named.items()}
    config = make_config("tiny" if small else "sm90", None, True, ids, 512, LAYERS | ({} if small else REAL))
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def fill(tensor: torch.Tensor, name: str, embedding: bool, seed: int) -> None:
    """One parameter, by its dtype, rank and own name, so that both models get the same distribution.

    Matrices in float: normal, unit gain (a gate's logits on normed rows are then N(0, 1)); embeddings N(0, 1);
    vectors named weight: 1, other vectors: 0.  FP4: random nibbles; E4M3: random up to 1.875; scales: 2^-7.
    """
    if tensor.device.type == "meta" or not tensor.numel():
        return
    if (value := getattr(tensor, "dummy_weight_value", None)) is not None:
        tensor.fill_(value)
        return
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if tensor.dtype == torch.float8_e8m0fnu or ("scale" in name and tensor.dtype == torch.uint8):
        tensor.view(torch.uint8).fill_(E8M0)
    elif "scale" in name and tensor.is_floating_point() and tensor.ndim > 1:
        tensor.fill_(2.0 ** (E8M0 - 127))
    elif tensor.dtype in (torch.uint8, torch.int8):
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    elif tensor.dtype == torch.float8_e4m3fn:
        raw = tensor.view(torch.uint8).random_(0, 128, generator=generator)
        raw.add_(raw // 64 * 64)  # bytes 0 to 63, and the same with the sign bit
    elif tensor.is_floating_point() and tensor.ndim > 1:
        tensor.normal_(0, 1.0 if embedding else tensor.shape[-1] ** -0.5, generator=generator)
    elif tensor.is_floating_point():
        tensor.fill_(1.0 if name.endswith("weight") else 0.0)


def patch_dummy_weights() -> None:
    """The host's dummy loader fills by `fill`, each tensor from a seed of its own: layers of equal weights would send a
    token to the same experts everywhere.  Its own values are near 0, norms included, and 0.32's do not know a scale.

    Our models, target and draft, prepared what they were made with: they do so again with what they now hold.
    """
    from vllm.model_executor.model_loader import dummy_loader

    from deepseek_v41_plugin.model.prepare import prepare
    from deepseek_v41_plugin.model.settings import Settings

    def load_weights(self, model, model_config) -> None:
        seed = 0
        for path, layer in model.named_modules():
            info = dummy_loader.get_layerwise_info(layer)
            if info.can_load():
                self._process_online_quant_layer(layer, info)
                continue
            for name, tensor in dummy_loader.get_layer_tensors(layer).items():
                if name not in layer._non_persistent_buffers_set:
                    seed += 1
                    fill(tensor, name, "embed" in path, seed)
        core = getattr(model, "model", None)
        if isinstance(getattr(core, "settings", None), Settings):
            prepare(core)

    dummy_loader.DummyModelLoader.load_weights = load_weights
