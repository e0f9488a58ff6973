# SPDX-License-Identifier: Apache-2.0
"""The core loaded as a host would load it."""

import json
import random
from pathlib import Path

import torch

from deepseek_v41_plugin.config import ModelConfig
from deepseek_v41_plugin.model.draft import Draft
from deepseek_v41_plugin.model.loading import load_checkpoint, load_draft
from deepseek_v41_plugin.model.model import Model
from deepseek_v41_plugin.model.settings import Settings


def load_core(folder: Path, dtype: torch.dtype = torch.float64, device: str = "cpu", **settings) -> Model:
    """A model of the checkpoint in `folder`; float64 is the exact mode."""
    model = _built(Model, folder, device, Settings(dtype, **settings))
    load_checkpoint(model, folder)
    return model


def load_core_draft(folder: Path, dtype: torch.dtype = torch.float64, device: str = "cpu", **settings) -> Draft:
    """The draft of the same checkpoint."""
    draft = _built(Draft, folder, device, Settings(dtype, **settings))
    load_draft(draft, folder)
    return draft


def _built(kind, folder: Path, device: str, settings: Settings):
    cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    with torch.device(device):
        return kind(cfg, settings)


def random_ids(rng: random.Random, cfg: ModelConfig, length: int) -> list[int]:
    """Any ids but the image token's, which the reference does not read."""
    return rng.choices([i for i in range(cfg.vocab_size) if i != cfg.image_token_id], k=length)
