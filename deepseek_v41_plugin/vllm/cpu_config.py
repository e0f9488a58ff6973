# SPDX-License-Identifier: Apache-2.0
"""Keeps chunked prefill, prefix caching and block sizes, which a CPU host takes from latent-attention models.

It has no kernels for them unless the CPU has AMX tiles; ours run on any.
"""

from __future__ import annotations

from .gates import ours

PATCHES = ("vllm.platforms.cpu.CpuPlatform.check_and_update_config",)

# What the host itself takes where its attention kernels leave the choice.
BLOCK_SIZE = 128


def install() -> None:
    """Wrap the platform's check, once; a host on another platform is left alone."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config
    if getattr(original, "dsv41", False):
        return

    def check_and_update_config(vllm_config) -> None:
        if not ours(vllm_config):
            return original(vllm_config)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunks, budget = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefixes, block = cache.enable_prefix_caching, cache.block_size
        original(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks, budget
        cache.enable_prefix_caching = prefixes
        cache.block_size = block if cache.user_specified_block_size else BLOCK_SIZE

    check_and_update_config.dsv41 = True
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
