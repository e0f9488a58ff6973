# SPDX-License-Identifier: Apache-2.0
"""vLLM adapter.  `register` is the `vllm.general_plugins` entry point, run in every process."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.dsv41")

MODEL = "DeepseekV41ForCausalLM"
DRAFT = "DSparkV41DraftModel"


def register() -> None:
    """Put the plugin's classes into the host's registries, or say why not and stand aside.

    With DSV41_IMPL=plugin there is nothing to stand aside for: the launch stops with the reason.
    """
    from .hooks import install
    from .options import implementation

    try:
        install()
    except Exception as error:
        if implementation() == "plugin":
            raise
        logger.warning("deepseek-v41-plugin stands aside: %s: %s", type(error).__name__, error)
