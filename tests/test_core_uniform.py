# SPDX-License-Identifier: Apache-2.0
"""Uniform routing: even whatever the gate learned, and of the row's own bits."""

from types import SimpleNamespace

import torch

from deepseek_v41_plugin.kernels.moe import route
from deepseek_v41_plugin.model.loading import fill_parameters
from deepseek_v41_plugin.model.moe import MoE
from deepseek_v41_plugin.model.parameters import Hidden
from deepseek_v41_plugin.model.prepare import prepare
from deepseek_v41_plugin.model.settings import Settings
from deepseek_v41_plugin.model.uniform import scattered

EXPERTS, TOP_K, ROWS = 16, 3, 4096
CFG = SimpleNamespace(
    hidden_size=256, moe_intermediate_size=32, n_shared_experts=1, swiglu_limit=7.0, routed_scaling_factor=1.5, gate_temp=1.0,
)


def layer_of(uniform: bool) -> MoE:
    """A gate that loves expert 0."""
    layer = MoE(CFG, Settings(torch.float32, uniform_routing=uniform), EXPERTS, TOP_K)
    fill_parameters(layer, 0)
    with torch.no_grad():
        layer.gate.bias.zero_()[0] = 100.0
    prepare(layer)
    return layer


def busiest(layer: MoE, x: torch.Tensor) -> float:
    """Rows of the busiest expert over the mean."""
    ids, _ = route(scattered(x) if layer.settings.uniform_routing else x, layer.gate.weight, layer.gate.bias, TOP_K, 1.0)
    return float(torch.bincount(ids.flatten(), minlength=EXPERTS).max() / (ROWS * TOP_K / EXPERTS))


def test_even_and_by_bits():
    x = torch.randn(ROWS, CFG.hidden_size, generator=torch.Generator().manual_seed(1)) * 0.1 + 3.0  # rows are much alike
    assert busiest(layer_of(False), x) > EXPERTS / TOP_K - 0.01, "every row goes to expert 0"
    layer = layer_of(True)
    assert busiest(layer, x) < 1.3
    assert torch.equal(layer.gate.weight, layer_of(True).gate.weight), "the same on all ranks"
    assert torch.equal(scattered(x)[5:9], scattered(x[5:9]))


def test_the_layer_routes_so(monkeypatch):
    from deepseek_v41_plugin.kernels import moe as ops

    seen, real = [], ops.route
    monkeypatch.setattr(ops, "route", lambda x, *rest: seen.append(x) or real(x, *rest))
    x = torch.randn(5, CFG.hidden_size)
    for uniform in (False, True):
        layer_of(uniform)(Hidden(x))
    assert torch.equal(seen[0], x) and torch.equal(seen[1], scattered(x))
