# SPDX-License-Identifier: Apache-2.0
"""Which graphs the host is to capture, and what stands against it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="modes are the host's")

from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from deepseek_v41_plugin.kernels.registry import OPS
from deepseek_v41_plugin.vllm import graphs, model  # the model registers all ops
from deepseek_v41_plugin.vllm.backend import DeepseekV41MetadataBuilder


def launch(mode=None, eager=False, dtype=torch.bfloat16, drafts=5, ranks=1, **options):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(enable_expert_parallel=True, data_parallel_size=ranks),
        model_config=SimpleNamespace(enforce_eager=eager, dtype=dtype, hf_config=None), num_speculative_tokens=drafts,
        compilation_config=SimpleNamespace(cudagraph_mode=mode), additional_config={"dsv41": options},
        device_config=SimpleNamespace(device_type="cuda"),
    )


def test_modes_on_a_gpu(monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    M = CUDAGraphMode
    for asked, got in ((None, M.FULL_DECODE_ONLY), (M.FULL_AND_PIECEWISE, M.FULL_DECODE_ONLY), (M.PIECEWISE, M.FULL_DECODE_ONLY), (M.NONE, M.NONE)):
        config = launch(asked)
        graphs.choose_mode(config)
        assert config.compilation_config.cudagraph_mode == got and not config.model_config.enforce_eager
    config = launch(eager=True)
    graphs.choose_mode(config)
    assert config.compilation_config.cudagraph_mode is None, "the host's own rule for eager models follows"


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU all of whose kernels are there; hidden sizes as given."""
    sizes = SimpleNamespace(hidden_size=5120, moe_intermediate_size=2304)
    monkeypatch.setattr(graphs, "model_config_of", lambda hf_config: sizes)
    chosen = {name: SimpleNamespace(name="triton", graphs=True) for name in OPS}
    for name, op in OPS.items():
        monkeypatch.setattr(op, "choose", lambda device, name=name: chosen[name])
    return sizes, chosen


def test_what_stands_against_graphs(gpu):
    sizes, chosen = gpu
    support = DeepseekV41MetadataBuilder.get_cudagraph_support
    assert graphs.why_no_graphs(launch()) is None and support(launch(), None) == AttentionCGSupport.UNIFORM_BATCH
    assert DeepseekV41MetadataBuilder.get_varlen_cudagraph_max_query_len(launch(), None) == 6
    for config, text in (
        (launch(exact=True), "float64"), (launch(dtype=torch.float32), "float32"), (launch(batch_invariant=True), "batch-invariant"),
        (launch(activation_quant=False), "activation_quant is off"), (launch(ranks=2), "data parallel ranks"),
    ):
        assert text in graphs.why_no_graphs(config) and support(config, None) == AttentionCGSupport.NEVER
        assert DeepseekV41MetadataBuilder.get_varlen_cudagraph_max_query_len(config, None) is None
    sizes.moe_intermediate_size = 64
    assert "moe_intermediate_size = 64" in graphs.why_no_graphs(launch())
    sizes.moe_intermediate_size = 128
    chosen["index_select"].graphs = False
    assert "index_select wait for the device" in graphs.why_no_graphs(launch())


def test_plain_ops_that_wait_say_so():
    """Those whose plain form reads counts back."""
    cpu = torch.device("cpu")
    assert {name for name, op in OPS.items() if not op.choose(cpu).graphs} == {"moe_experts", "index_select"}
