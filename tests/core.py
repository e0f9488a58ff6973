# SPDX-License-Identifier: Apache-2.0
"""The core loaded as a host would load it."""

import json
from pathlib import Path

import torch

from deepseek_v41_plugin.config import ModelConfig
from deepseek_v41_plugin.model.loading import load_checkpoint
from deepseek_v41_plugin.model.model import Model
from deepseek_v41_plugin.model.settings import Settings


def load_core(folder: Path, dtype: torch.dtype = torch.float64, device: str = "cpu", **settings) -> Model:
    """A model of the checkpoint in `folder`; float64 is the exact mode."""
    cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    with torch.device(device):
        model = Model(cfg, Settings(dtype, **settings))
    load_checkpoint(model, folder)
    return model
