# SPDX-License-Identifier: Apache-2.0
"""The steps that have kernels compiled: what they are, and that they leave no trace in a serving engine."""

from types import SimpleNamespace

import torch

from tests.e2e.engine.harness import ask, check_request, random_prompt
from tests.e2e.engine.oracle import drafting, runner_of


def unchanged(*models):
    """A check that no byte of the models' caches has changed since, but for the null block's.

    Bytes, not numbers: caches of several types share their pages, and one's record may be another's NaN.
    """
    layers = [layer for model in models for layer in model.caches]
    caches = [cache for layer in layers for cache in (layer.window, layer.compressed, layer.index, layer.ring) if cache is not None]
    pages = [cache.kv_cache[1:].view(torch.uint8) for cache in caches]
    before = [page.clone() for page in pages]

    def check() -> None:
        assert all(torch.equal(page, was) for page, was in zip(pages, before, strict=True))

    return check


def test_warm_up_leaves_no_trace(engines, reference, run_rng, monkeypatch):
    """Between two requests that share a prefix: the second finds the first's caches as they were, to the last byte."""
    llm = engines(block_size=8, prefix_cache_retention_interval=None)
    from deepseek_v41_plugin.vllm import warm_up

    runner, prompt = runner_of(llm), random_prompt(run_rng, reference, 49)
    check_request(reference, *ask(llm, [prompt], max_tokens=4))
    check = unchanged(runner.model)
    monkeypatch.setattr(warm_up, "ROWS", (1, 7, 40))
    monkeypatch.setattr(warm_up, "ALL_LENGTHS", (7,))
    monkeypatch.setattr(warm_up, "PRODUCT_ROWS", (40,))
    seen = []
    hook = runner.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True)
    state = runner.model_state
    state.capture_inner_cudagraphs(runner.input_buffers, runner.block_tables, runner.attn_groups, runner.kv_cache_config)
    assert set(seen) == {1, 7, 40, state.max_num_tokens} and seen.count(7) > seen.count(40) > 2
    count = len(seen)
    state.capture_inner_cudagraphs(runner.input_buffers, runner.block_tables, runner.attn_groups, runner.kv_cache_config)
    assert len(seen) == count, "once is enough"
    hook.remove()
    check()
    again, = ask(llm, [prompt + random_prompt(run_rng, reference, 3)], max_tokens=4)
    assert again.num_cached_tokens == 48
    check_request(reference, again)


def test_drafts_are_captured(engines, reference, run_rng, monkeypatch):
    """The host captures the draft's graphs without positions or lengths on its side, and after steps of its own that may
    have left the last draft pass out."""
    llm = engines(**drafting(3))
    # The host's workers are imported by an engine, not before.
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.dflash import cudagraph

    runner, speculator = runner_of(llm), runner_of(llm).speculator
    check_request(reference, *ask(llm, [random_prompt(run_rng, reference, 30)], max_tokens=4))
    check, passes = unchanged(runner.model, speculator.model), []
    run_model = speculator._run_model

    def capture(forward, input_buffers, block_tables, attn_groups, kv_cache_config, max_model_len, causal, prepare_forward, **_):
        for requests in (1, 5):
            rows = requests * speculator.num_query_per_req
            metadata, slots = cudagraph._prepare_dflash_inputs_to_capture(
                requests, rows, input_buffers, block_tables, attn_groups, kv_cache_config, max_model_len, False, causal,
            )
            prepare_forward(requests, metadata)
            forward(requests, rows, metadata, slots, None, CUDAGraphMode.NONE)

    with monkeypatch.context() as patch:
        patch.setattr(speculator, "query_cudagraph_manager", SimpleNamespace(capture=capture))
        patch.setattr(speculator, "_run_model", lambda *args, **kwargs: passes.append(args[0]) or run_model(*args, **kwargs))
        speculator.drafted = False
        speculator.capture()
    assert passes == [3, 15]
    assert speculator.counts.tally.steps == 0 and not speculator.counts.skipped, "steps before serving are nobody's"
    check()
    check_request(reference, *ask(llm, [random_prompt(run_rng, reference, 30)], max_tokens=6))


def test_up_to():
    from deepseek_v41_plugin.vllm import warm_up

    assert warm_up.up_to((1, 4, 9), 6) == [1, 4, 6] and warm_up.up_to((1, 4, 9), 4) == [1, 4] and warm_up.up_to((1,), 7) == [1, 7]
