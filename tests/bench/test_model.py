# SPDX-License-Identifier: Apache-2.0
"""Dummy weights: a model that was prepared before they were filled is prepared for what it then holds."""

import pytest
import torch
from hopper.model import fill, patch_dummy_weights
from torch import nn

from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.model import prepare as preparing
from deepseek_v41_plugin.model.loading import fill_parameters
from tests.core import load_core, load_core_draft


@pytest.fixture
def loader(monkeypatch):
    """The host's dummy loader, patched, where kernels take prepared weights."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    monkeypatch.setattr(preparing, "why_plain", lambda settings, device: None)
    monkeypatch.setattr(DummyModelLoader, "load_weights", DummyModelLoader.load_weights)
    patch_dummy_weights()
    return DummyModelLoader(LoadConfig(load_format="dummy"))


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """All that a forward may read: parameters, and what they were prepared as."""
    found = {name: parameter for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for what in ("row", "joined", "words", "parts"):
            value = getattr(module, what, None)
            for i, tensor in enumerate((value,) if isinstance(value, torch.Tensor) else value or ()):
                found[f"{name}.{what}.{i}"] = tensor
    return found


@pytest.mark.parametrize("load", [load_core, load_core_draft])
def test_prepared_again(loader, run_seed, tmp_path, load):
    folder = write_tiny(tmp_path / "tiny", preset="tiny", seed=run_seed)
    host, fresh = nn.Module(), nn.Module()
    host.model, fresh.model = (load(folder, torch.bfloat16) for _ in "xy")
    # As the adapter makes it; uneven scales, whose exponents `prepare` moves.
    fill_parameters(host.model, run_seed % 1000)
    generator = torch.Generator().manual_seed(run_seed)
    for name, parameter in host.model.named_parameters():
        if name.endswith("scale") and parameter.dtype == torch.uint8:
            parameter.data.copy_(torch.randint(116, 121, parameter.shape, generator=generator))
    preparing.prepare(host.model)
    before = {name: tensor.clone() for name, tensor in held(host.model).items()}
    loader.load_weights(host, None)
    loader.load_weights(fresh, None)
    got, want = held(host.model), held(fresh.model)
    assert got.keys() == want.keys() == before.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor.view(torch.uint8), want[name].view(torch.uint8)), name
    for what in ("row", "words", "parts"):
        assert any(not torch.equal(got[name].view(torch.uint8), before[name].view(torch.uint8)) for name in got if f".{what}." in name)
    assert {name for name in got if ".row." in name} and {name for name in got if ".parts." in name}


def test_other_models_are_filled_only(loader, monkeypatch):
    """The host's own have no settings of ours."""
    monkeypatch.setattr(preparing, "why_plain", None)
    host = nn.Module()
    host.model = nn.Linear(8, 8, bias=False)
    loader.load_weights(host, None)
    filled = torch.empty(8, 8)
    fill(filled, "weight", False, 1)
    assert torch.equal(host.model.weight, filled)
