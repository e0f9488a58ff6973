# SPDX-License-Identifier: Apache-2.0
"""The host's KV connectors as this model needs them.

`--kv-transfer-config` names a connector of the host; the launch checks set `kv_connector_module_path` to this module,
where every name is the host's class of that name with what `Transfer` adds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def sent(config: KVCacheConfig) -> KVCacheConfig:
    """`config` without the cache groups that a receiver rebuilds.

    With bounded replay the receiver runs the last window of what it loads again, which writes window rows (the draft's
    too).  Loads then end at a block's end, where no pair of rows is waiting, so rings stay as well.
    """
    groups = config.kv_cache_groups
    if not any(group.kv_cache_spec.prefix_replay_tokens for group in groups):
        return config
    return replace(config, kv_cache_groups=[
        replace(group, enable_kv_transfer=group.enable_kv_transfer and group.kv_cache_spec.prefix_cacheable) for group in groups
    ])


class Transfer:
    """Mixed into a connector class of the host, before it."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, sent(kv_cache_config))


def take_over(config: KVTransferConfig) -> None:
    """Have the host load its connectors from here, also those inside MultiConnector; other modules' are left alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if config.kv_connector == "MultiConnector":
        extra = config.kv_connector_extra_config
        extra["connectors"] = [
            child if child.get("kv_connector_module_path") or child["kv_connector"] not in KVConnectorFactory._registry
            else child | {"kv_connector_module_path": __name__} for child in extra.get("connectors", [])
        ]
    elif not config.kv_connector_module_path and config.kv_connector in KVConnectorFactory._registry:
        config.kv_connector_module_path = __name__


def __getattr__(name: str) -> type:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        raise AttributeError(f"vLLM has no KV connector {name}")
    return type(name, (Transfer, KVConnectorFactory.get_connector_class_by_name(name)), {"__module__": __name__})
