# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft's place in the registry."""

from __future__ import annotations

from torch import nn


class DSparkV41DraftModel(nn.Module):
    """Refuses by name, so that a launch with DSpark says why instead of failing inside the host."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        raise NotImplementedError(
            "DSparkV41DraftModel: drafting is not served by the plugin yet. "
            "Remove --speculative-config or set DSV41_IMPL=host"
        )
