"""vLLM adapter.  `register` is the `vllm.general_plugins` entry point, run in every process."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.dsv41")

MODEL = "DeepseekV41ForCausalLM"
DRAFT = "DSparkV41DraftModel"


def register() -> None:
    """Put the plugin's classes into the host's registries, or say why not and stand aside."""
    from .hooks import install

    try:
        install()
    except Exception as error:  # the host must start without us
        logger.warning("deepseek-v41-plugin stands aside: %s: %s", type(error).__name__, error)
