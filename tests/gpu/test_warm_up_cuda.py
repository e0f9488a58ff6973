# SPDX-License-Identifier: Apache-2.0
"""An engine with CUDA graphs: nothing is compiled once it has started, and what graphs say is what eager steps say."""

import pytest

from deepseek_v41_plugin.cli.tiny import write_tiny

pytest.importorskip("vllm", reason="the engine is the host's")

LIMIT = 2048


@pytest.fixture(scope="module")
def compiled():
    """Names of the plugin's kernels, as they are compiled; the host's own depend on lengths."""
    import triton

    names = []

    def note(repr, fn=None, **_):
        if fn is not None and fn.module.startswith("deepseek_v41_plugin"):
            names.append(repr)

    triton.knobs.runtime.jit_post_compile_hook = note
    yield names
    triton.knobs.runtime.jit_post_compile_hook = None


def start(folder, drafts: bool, **options):
    from vllm import LLM

    speculative = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}} if drafts else {}
    return LLM(
        str(folder), max_model_len=4096, max_num_seqs=40, max_num_batched_tokens=LIMIT, block_size=64,
        kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.3, **speculative, **options,
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_graphs_say_what_eager_steps_say(run_seed, run_rng, tmp_path, monkeypatch, drafts):
    """bf16, so most tokens are the same and chosen tokens' logprobs near; 3 and 11 requests leave padding in a graph."""
    from vllm import SamplingParams

    monkeypatch.setenv("DSV41_IMPL", "plugin")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = write_tiny(tmp_path / "model", preset="sm90", seed=run_seed)
    batches = [[[run_rng.randrange(3, 250) for _ in range(run_rng.randrange(1, 700))] for _ in range(n)] for n in (1, 3, 11)]
    said = []
    for options in ({}, {"enforce_eager": True}):
        llm = start(folder, drafts, **options)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        said.append([
            request.outputs[0] for prompts in batches
            for request in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        ])
    off, first = [], 0
    for graph, eager in zip(*said, strict=True):
        first += graph.token_ids[0] == eager.token_ids[0]
        for a, b, x, y in zip(graph.token_ids, eager.token_ids, graph.logprobs, eager.logprobs, strict=True):
            if a != b:
                break  # from there on they answer different sequences
            off.append(abs(x[a].logprob - y[b].logprob))
    assert first >= 13 and len(off) > 40, (first, len(off))
    assert sorted(off)[len(off) // 2] < 0.05, sorted(off)


@pytest.mark.parametrize("drafts", [False, True])
def test_nothing_is_compiled_after_the_start(run_seed, run_rng, tmp_path, monkeypatch, compiled, drafts):
    """Prompts of all lengths, alone and together, decodes of 1 to 40 requests, hits in the prefix cache."""
    from vllm import SamplingParams

    monkeypatch.setenv("DSV41_IMPL", "plugin")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = start(write_tiny(tmp_path / "model", preset="sm90", seed=run_seed), drafts)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert runner.cudagraph_manager.graphs, "no decode step was captured"
    at_start = len(compiled)
    assert at_start, "the hook sees what is compiled"
    longest = 3000
    base = [run_rng.randrange(3, 250) for _ in range(longest)]
    for count in (1, 2, 5, 40):
        prompts = [base[: run_rng.randrange(1, longest)] for _ in range(count)]
        llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False,
        )
    assert not compiled[at_start:]
