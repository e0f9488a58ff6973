# SPDX-License-Identifier: Apache-2.0
"""A CPU host's choices for other models' kernels are not made for ours, whatever the CPU."""

import pytest

pytest.importorskip("vllm", reason="builds the host's configs")

from deepseek_v41_plugin.cli.tiny import write_tiny  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("config") / "tiny", preset="tiny", seed=1)


@pytest.mark.parametrize("tiles", [False, True])
def test_chunks_prefixes_and_blocks_stay(folder, monkeypatch, tiles):
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the host's CPU platform is not in use")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    asked = dict(max_num_batched_tokens=13, max_num_seqs=2, max_model_len=64, enforce_eager=True)
    got = EngineArgs(str(folder), block_size=8, enable_prefix_caching=True, **asked).create_engine_config()
    assert got.scheduler_config.enable_chunked_prefill and got.scheduler_config.max_num_batched_tokens == 13
    assert got.cache_config.enable_prefix_caching and got.cache_config.block_size == 8
    plain = EngineArgs(str(folder), enable_prefix_caching=False, **asked).create_engine_config()
    assert not plain.cache_config.enable_prefix_caching and plain.cache_config.block_size == 128
