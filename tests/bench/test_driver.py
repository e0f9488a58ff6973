# SPDX-License-Identifier: Apache-2.0
"""Crafted steps say what the engine says for the same prompt, and KV filled by fiat is made of the model's own blocks."""

CODE = """
import os, sys, tempfile
os.environ |= dict(DSV41_IMPL="plugin", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="1")
import random
from pathlib import Path


def main(seed):
    import numpy, torch, vllm
    from hopper.driver import Driver
    from hopper.model import patch_dummy_weights, write_model

    patch_dummy_weights()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), small=True)
        llm = vllm.LLM(folder, load_format="dummy", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, block_size=16,
                       kv_cache_memory_bytes=24 << 20, enable_prefix_caching=False, gpu_memory_utilization=0.05, enforce_eager=True,
                       swa_bounded_replay=False)
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 500) for _ in range(rng.randrange(30, 90))]
    asked = vllm.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    wanted = list(llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0].outputs[0].token_ids)
    driver = Driver(llm, seed=seed)
    assert 0.9 * (24 << 20) < driver.kv_bytes <= 24 << 20, "the bytes that the engine was given"
    # As many requests of 200 tokens as there are blocks for: all rows, the window's reach, one ring each.
    ids = sum({"ring": 1, "full": 216 // g.block + 1, "window": 216 // g.block + 1 - (184 - g.window) // g.block}[g.kind] for g in driver.groups)
    assert abs(driver.tokens_per_gib(200) / (200 * driver.blocks / ids / (24 / 1024)) - 1) < 0.1
    request = driver.alone(prompt, len(prompt) + 6)
    said = driver.prefill(request, 32)
    while len(said) < 6:
        said += driver.read(driver.step([(request, 1, 0)]))[request.name]
    driver.finish([request])
    assert said == wanted, (said, wanted)

    contexts = driver.own_blocks(100, 140) * 3
    driver.fill_cache(96, 32, contexts)
    requests, shared = driver.requests(3, 100, 101, 140)
    for index, group in enumerate(driver.groups):
        tables = [r.blocks[index] for r in requests]
        first, total, begin = driver.needs(group, 100, 140)
        own = [b for table in tables for b in table[first:]]
        assert len(set(own)) == len(own) == 3 * (total - first) and all(len(t) == total for t in tables)
        assert set(own).isdisjoint(group.pool) and set(own).isdisjoint(group.source)
        # Whatever the driver calls its own: rows 100 to 139 are written, and a window reads from 100 - window + 1 on.
        written = 0 if group.kind == "ring" else 100 // group.block
        reached = written if group.kind != "window" else max(0, 100 - group.window + 1) // group.block
        private = [b for table in tables for b in table[reached:]]
        assert len(set(private)) == len(private) and set(private).isdisjoint(group.pool) and 0 not in private, group.kind
        older = [b for table in tables for b in table[begin:first]]
        assert len(set(older)) == len(older) and set(older) <= set(group.pool)
        for view in group.views:
            sources = {view[b].contiguous().view(torch.uint8).numpy().tobytes() for b in group.source}
            for block in own + older:
                assert view[block].contiguous().view(torch.uint8).numpy().tobytes() in sources, (group.kind, block)
            if group.kind == "full":
                assert any(any(s) for s in sources), "the model wrote nothing there"
    assert shared < 1
    driver.read(driver.step([(r, 1, 0) for r in requests]))
    found = driver.decode(requests, 2)
    assert found["said"] == 6 and driver.finite() and all(r.computed == 103 for r in requests)
    try:
        driver.requests(4, 100, 101, 140)
    except ValueError as error:
        assert "more than set aside" in str(error)
    else:
        raise AssertionError("four requests fit into room for three")
    print("driven")


if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


def test_crafted_steps_and_copied_blocks(bench, run_seed):
    assert "driven" in bench("", str(run_seed), code=CODE)
