# SPDX-License-Identifier: Apache-2.0
"""Windows come and go in the pool that also holds compressed rows: they take no prefix along."""

import pytest

from tests.e2e.engine.harness import ask, random_prompt
from tests.e2e.engine.test_bounded_replay import BLOCK, WINDOW, options


def pool_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def test_windows_do_not_evict_prefixes(engines, reference, run_rng):
    """A kept prefix is still hit after requests that took and gave back blocks for more than the pool, while what is
    worth keeping of them (always the same prompt) fits beside it."""
    llm = engines(**options("off"), kv_cache_memory_bytes=1 << 20, max_model_len=256)
    pool = pool_of(llm)
    kept, other = (random_prompt(run_rng, reference, n) for n in (12 * BLOCK + 3, 10 * BLOCK + 5))
    ask(llm, [kept], max_tokens=1)
    taken, least, get = 0, pool.num_gpu_blocks, pool.get_new_blocks

    def count(blocks, *args, **kwargs):
        nonlocal taken, least
        taken, least = taken + blocks, min(least, pool.get_num_free_blocks() - blocks)
        return get(blocks, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "get_new_blocks", count)
        while taken < 1.5 * pool.num_gpu_blocks:
            ask(llm, [other] * 2, max_tokens=BLOCK)
    assert least > 2 * 12, "the requests together leave room for the blocks of the prefix, of which two groups keep 12 each"
    again, = ask(llm, [kept], max_tokens=1)
    assert again.num_cached_tokens == 12 * BLOCK
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but the null block"


def test_a_full_pool_keeps_serving(engines, reference, run_rng):
    """Many more requests at once than the pool holds windows for: each gets its turn, and all blocks come back."""
    llm = engines(**options("off"), kv_cache_memory_bytes=1 << 20, max_model_len=256)
    prompts = [random_prompt(run_rng, reference, run_rng.randrange(WINDOW + 1, 14 * BLOCK)) for _ in range(20)]
    assert all(len(request.outputs[0].token_ids) == 3 for request in ask(llm, prompts, max_tokens=3))
    pool = pool_of(llm)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
