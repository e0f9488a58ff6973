# SPDX-License-Identifier: Apache-2.0
"""The host's config class, validated: a bad config.json stops here, before anything is built."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config as HostConfig

from ..config import ModelConfig


class DeepseekV41Config(HostConfig):
    """The host's flattened config plus `dsv41_raw`, the nested values as released."""

    def __init__(self, text_config: dict[str, Any] | None = None, vision_config: dict[str, Any] | None = None, **kwargs):
        raw = kwargs.pop("dsv41_raw", None)
        if raw is None and text_config is not None:
            raw = {**kwargs, "model_type": self.model_type, "text_config": dict(text_config)}
            if vision_config is not None:
                raw["vision_config"] = dict(vision_config)
        if raw is not None:
            raw = {k: v for k, v in raw.items() if _plain(v)}
            ModelConfig.from_hf(raw)
        super().__init__(text_config, vision_config, **kwargs)
        self.dsv41_raw = raw

    @property
    def quantization_config(self) -> None:
        """None: the formats are ours to read, so the host applies no method and none of its limits on dtypes."""

    @quantization_config.setter
    def quantization_config(self, value: Any) -> None:
        """Dropped; the host sets it from config.json after construction.  `dsv41_raw` keeps it."""


def _plain(value: Any) -> bool:
    """JSON values only: loaders pass dtypes and such among the keyword arguments."""
    return value is None or isinstance(value, (bool, int, float, str, list, dict))


def model_config_of(hf_config: Any) -> ModelConfig:
    """The validated config of a host config object."""
    return ModelConfig.from_hf(hf_config.dsv41_raw)
