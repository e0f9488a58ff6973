# SPDX-License-Identifier: Apache-2.0
"""The host's doors to expert load balancing: ours for our models, else the host's.

The host keeps one state for target and draft, whose experts must be equal in number, and its worker may
wait for ever; ours keeps each by itself.  The runner's calls are the host's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import Options, draft_eplb_config
from .patching import wrap

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

PATCHES = (
    "vllm.config.parallel.current_platform",
    "vllm.v1.worker.gpu.eplb_utils.EPLBController.maybe_register_model",
    "vllm.v1.worker.gpu.eplb_utils.EPLBController.maybe_register_speculator",
    "vllm.v1.worker.gpu.eplb_utils.EPLBController.step",
)


class EplbPlatform:
    """The CPU platform, for `ParallelConfig` alone, which asks no other question before it refuses EPLB."""

    def __init__(self, platform: Any):
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


def install() -> None:
    from vllm.config import parallel
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.eplb_utils import EPLBController

    if current_platform.is_cpu() and not isinstance(parallel.current_platform, EplbPlatform):
        parallel.current_platform = EplbPlatform(parallel.current_platform)
    wrap(EPLBController, "maybe_register_model", _register_model)
    wrap(EPLBController, "maybe_register_speculator", _register_speculator)
    wrap(EPLBController, "step", _step)


def refuse(vllm_config: VllmConfig) -> None:
    """What `ParallelConfig` would have said of a model that is not ours."""
    from vllm.platforms import current_platform

    if vllm_config.parallel_config.enable_eplb and current_platform.is_cpu():
        raise ValueError("enable_eplb: on a CPU only DeepSeek-V4.1 balances its experts. Remove --enable-eplb")


def _register_model(original, controller, model: nn.Module, model_config: ModelConfig) -> bool:
    from .model import DeepseekV41ForCausalLM

    if not controller.parallel_config.enable_eplb:
        return original(controller, model, model_config)
    if isinstance(model, DeepseekV41ForCausalLM):
        layers = [layer.ffn for layer in model.model.layers]
        _add(controller, "target", layers, controller.parallel_config.eplb_config, model, model.vllm_config)
        return False  # the host starts no worker of its own
    return original(controller, model, model_config)


def _register_speculator(original, controller, speculator: Any, speculative_config: Any, load_dummy_weights: bool) -> bool:
    from .draft import DSparkV41DraftModel

    model = getattr(speculator, "model", None)
    if not controller.parallel_config.enable_eplb or not isinstance(model, DSparkV41DraftModel):
        return original(controller, speculator, speculative_config, load_dummy_weights)
    layers = [stage.ffn for stage in model.model.mtp]
    # The engine's config: the draft's own, which the host derived from it, has another name for the engine.
    vllm_config = speculator.vllm_config
    own = draft_eplb_config(controller.parallel_config, Options.parse(vllm_config.additional_config))
    _add(controller, "draft", layers, own, model, vllm_config)
    return False


def _add(controller, name: str, layers: list, config: Any, model: Any, vllm_config: VllmConfig) -> None:
    """On all ranks in the same order: the draft, if there is one, then the target."""
    from .balance import ModelBalance

    balanced = ModelBalance(name, layers, config, model.model.settings.expert_ranks, vllm_config)
    controller.dsv41 = [*getattr(controller, "dsv41", ()), balanced]


def _step(original, controller, is_dummy: bool = False, is_profile: bool = False) -> None:
    """After each forward pass, on all ranks."""
    models = getattr(controller, "dsv41", None)
    if models is None:
        original(controller, is_dummy, is_profile)
    elif not controller.suppressed and not is_profile:
        for model in models:
            model.step(is_dummy)
