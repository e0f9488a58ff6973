# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into the model: tensors one at a time, Engram tables mapped where they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from .. import checkpoint
from ..checkpoint.stream import stream
from ..config import ModelConfig
from .draft import Draft
from .engram import NgramHash
from .engram_hash import checked_vocab
from .engram_table import EngramTable
from .model import Model

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.(weight|scale)$")
_MIXER = re.compile(r"(.*\.hc_(?:attn|ffn))_(fn|base|scale)$")
_NOT_TEXT = ("vision.", "aligner.", "image_")


def check_checkpoint(
    cfg: ModelConfig, directory: Path
) -> tuple[dict[str, checkpoint.TensorEntry], np.ndarray | None, list[str]]:
    """Everything that can be wrong with a folder, from headers and tokenizer.json alone.

    Returns its index, the compressed vocabulary (None without Engram) and the names of tensors that
    nothing asks for.  Raises `checkpoint.CheckpointError`, or ValueError for a wrong tokenizer.json.
    """
    index = checkpoint.read_index(directory)
    unknown = checkpoint.validate(cfg, directory, index)
    vocab = checked_vocab(cfg, directory / "tokenizer.json") if cfg.engram_layer_ids else None
    return index, vocab, unknown


def load_checkpoint(model: Model, directory: Path) -> None:
    """`check_checkpoint`, then stream the shards into the model and map the Engram tables.

    The peak is the model plus what is mapped of one shard.
    """
    cfg = model.cfg
    index, vocab, _ = check_checkpoint(cfg, directory)
    if vocab is not None:
        model.ngram_hash = NgramHash(cfg, vocab)
    load(model, stream(index, is_parameter))
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        weight, scale = (index[f"layers.{layer}.engram.embed.{kind}"] for kind in ("weight", "scale"))
        model.layers[layer].engram.table = EngramTable.open(
            (weight.path, weight.begin), (scale.path, scale.begin), rows, cfg.engram_head_dim,
        )


def load_draft(draft: Draft, directory: Path) -> None:
    """Stream the `mtp.` tensors of a folder that `load_checkpoint` has checked."""
    load(draft, stream(checkpoint.read_index(directory), lambda name: name.startswith("mtp.")))


def is_parameter(name: str) -> bool:
    """Whether the text model holds this tensor: not vision, not the draft, not an Engram table."""
    return not name.startswith((*_NOT_TEXT, "mtp.")) and ".engram.embed." not in name


def load(model: Model | Draft, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy each tensor into its place, this rank's part of it; another rank's experts are left out.

    Names, shapes and dtypes were checked before (`checkpoint.validate`).
    """
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        if match := _EXPERT.match(name):
            for place in _expert_places(model, *match.groups()):
                _copy(place, tensor)
            continue
        if match := _MIXER.match(name):
            name = f"{match.group(1)}.{match.group(2)}"
        parameter, shards = parameters[name], model.settings.shards
        if (dim := getattr(parameter, "shard_dim", None)) is not None:
            tensor = tensor.chunk(shards.size, dim)[shards.rank]
        _copy(parameter.data, tensor)


def _expert_places(model: Model | Draft, prefix: str, expert: str, which: str, kind: str) -> Iterable[torch.Tensor]:
    """Where this rank holds one tensor of a logical expert: nowhere, in its slot, in several if it has replicas."""
    held = model.get_submodule(prefix)
    suffix = "_scale" if kind == "scale" else ""
    for slot, logical in enumerate(held.loaded):
        if logical != int(expert):
            continue
        if which == "w2":
            yield getattr(held, "w2" + suffix)[slot]
        else:
            yield getattr(held, "w13" + suffix)[slot].chunk(2, 0)[which == "w3"]


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.dtype != target.dtype and tensor.element_size() == 1:
        tensor = tensor.contiguous().view(target.dtype)  # E8M0, I8: bytes, never a numeric conversion
    if tensor.shape != target.shape:
        raise ValueError(f"shape {tuple(tensor.shape)} does not fit {tuple(target.shape)}")
    target.copy_(tensor)


def fill_dummy(model: Model, seed: int = 0) -> None:
    """Finite seeded weights for `--load-format dummy` (see `fill_parameters`), and Engram tables of one zero row."""
    cfg = model.cfg
    if cfg.engram_layer_ids:
        model.ngram_hash = NgramHash(cfg, np.arange(cfg.vocab_size) % cfg.engram_compressed_vocab_size)
    for layer in cfg.engram_layer_ids:
        model.layers[layer].engram.table = EngramTable.zeros(cfg.engram_head_dim)
    fill_parameters(model, seed)


def fill_parameters(model: nn.Module, seed: int = 0) -> None:
    """Formats as released, values near 0.02."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if name.endswith("scale") and parameter.dtype == torch.uint8:
            parameter.data.fill_(120)
        elif parameter.dtype == torch.uint8:
            parameter.data.random_(0, 256, generator=generator)
        elif parameter.dtype == torch.float8_e4m3fn:
            bytes_ = torch.empty(parameter.shape, dtype=torch.uint8, device=parameter.device)
            bytes_.random_(0, 64, generator=generator)
            parameter.data.copy_((bytes_ + 128 * (bytes_ % 2)).view(torch.float8_e4m3fn))
        elif "norm" in name or name.endswith(("q_weight", "k_weight")):
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(0, 0.02, generator=generator)
