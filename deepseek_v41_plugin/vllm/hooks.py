# SPDX-License-Identifier: Apache-2.0
"""The host's registries this plugin writes to: checked by name first, then filled."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass

from . import DRAFT, MODEL
from .options import implementation

logger = logging.getLogger("vllm.dsv41")

TESTED_VERSIONS = ("0.32.0", "0.33.0")

# Entries of the host's own tables that are replaced: see patches/ledger.toml.
PATCHES = (
    "vllm.transformers_utils.config._CONFIG_REGISTRY[deepseek_v41]",
    "vllm.model_executor.models.config.MODELS_CONFIG_MAP[DeepseekV41ForCausalLM]",
    "vllm.tokenizers.registry.TokenizerRegistry[deepseek_v41]",
    "vllm.renderers.registry.RENDERER_REGISTRY[deepseek_v41]",
)


@dataclass(frozen=True)
class Hook:
    """A host symbol the plugin needs, and what for."""

    module: str
    attribute: str
    purpose: str

    def find(self) -> str | None:
        """None when present, else what is missing."""
        try:
            target = importlib.import_module(self.module)
            for part in self.attribute.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.attribute} ({self.purpose}): {error}"
        return None


HOOKS = (
    Hook("vllm.model_executor.models.registry", "ModelRegistry.register_model", "model classes"),
    Hook("vllm.model_executor.models.config", "MODELS_CONFIG_MAP", "checks before loading"),
    Hook("vllm.model_executor.models.config", "VerifyAndUpdateConfig", "checks before loading"),
    Hook("vllm.transformers_utils.config", "_CONFIG_REGISTRY", "config class"),
    Hook("vllm.transformers_utils.configs.deepseek_v41", "DeepseekV41Config", "config class"),
    Hook("vllm.tokenizers.registry", "TokenizerRegistry.tokenizers", "chat flags"),
    Hook("vllm.tokenizers.deepseek_v41", "get_deepseek_v41_tokenizer", "chat flags"),
    Hook("vllm.renderers.registry", "RENDERER_REGISTRY.renderers", "refusal of images"),
    Hook("vllm.renderers.deepseek_v4", "DeepseekV4Renderer", "refusal of images"),
    Hook("vllm.v1.attention.backends.registry", "register_backend", "attention backend"),
    Hook("vllm.v1.kv_cache_interface", "SlidingWindowMLASpec.prefix_replay_tokens", "window cache, bounded replay"),
    Hook("vllm.v1.core.sched.output", "NewRequestData.replay_start", "bounded replay"),
    Hook("vllm.v1.kv_cache_interface", "MLAAttentionSpec", "compressed rows and index keys"),
    Hook("vllm.v1.kv_cache_interface", "CircularBufferSpec", "waiting half pairs"),
    Hook("vllm.v1.worker.gpu.model_states.default", "DefaultModelState.prepare_inputs", "Engram's token history"),
    Hook("vllm.v1.worker.gpu.model_states.interface", "ModelState.capture_inner_cudagraphs", "kernels compiled before serving"),
    Hook("vllm.v1.worker.gpu.model_states.interface", "ModelState.prepare_dummy_inputs", "CUDA graphs"),
    Hook("vllm.v1.worker.gpu.cudagraph_utils", "prepare_inputs_to_capture", "kernels compiled before serving"),
    Hook("vllm.config.vllm", "VllmConfig._validate_adaptive_verification", "scheduled verification"),
    Hook("vllm.v1.worker.gpu.spec_decode", "init_speculator", "drafting"),
    Hook("vllm.v1.worker.gpu.spec_decode.dspark.speculator", "DSparkSpeculator.observe_verification", "drafting"),
    Hook("vllm.v1.worker.gpu.spec_decode.dspark.speculator", "DSparkSpeculator.capture", "drafting in CUDA graphs"),
    Hook("vllm.v1.worker.gpu.spec_decode.dspark.speculator", "DSparkSpeculator._generate_draft", "draft passes left out"),
    Hook("vllm.v1.worker.gpu.eplb_utils", "EPLBController.step", "expert load balancing"),
    Hook("vllm.model_executor.models.interfaces", "SupportsEagle3", "features for the draft"),
)


def wanted() -> tuple[bool, str]:
    """Whether the plugin's model serves here: (yes, why).

    `auto` takes the plugin's where the host has no kernels of its own, and the host's where ours are not
    known to be faster, as on SM90 until they are measured there.
    """
    choice = implementation()
    if choice != "auto":
        return choice == "plugin", f"DSV41_IMPL={choice}"
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return True, "the host has no CPU path for V4.1"
    if current_platform.is_rocm():
        return False, "the host's own ROCm model serves"
    capability = current_platform.get_device_capability()
    if capability is None:
        return False, "the device's compute capability is unknown"
    sm = f"SM{capability.major}{capability.minor}"
    if capability.major in (9, 10, 12):
        why = "the plugin's are not measured there yet" if capability.major == 9 else "the plugin has none for it"
        return False, f"the host's own {sm} kernels serve: {why}. DSV41_IMPL=plugin overrides"
    return True, f"the host has no {sm} kernels for V4.1"


def install() -> None:
    """Register model, draft, config, checks, chat classes and attention backend."""
    yes, why = wanted()
    if not yes:
        logger.info("deepseek-v41-plugin: the host's model serves (%s)", why)
        return
    if problem := untested():
        logger.warning("deepseek-v41-plugin: %s; `dsv41 doctor` checks the hooks", problem)
    missing = [problem for problem in (hook.find() for hook in HOOKS) if problem]
    if missing:
        raise RuntimeError("missing in this host: " + "; ".join(missing))
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import balance_gates, cpu_config, gates
    from .checks import DeepseekV41Checks
    from .hf_config import DeepseekV41Config

    package = __package__
    ModelRegistry.register_model(MODEL, f"{package}.model:{MODEL}")
    ModelRegistry.register_model(DRAFT, f"{package}.draft:{DRAFT}")
    _CONFIG_REGISTRY["deepseek_v41"] = DeepseekV41Config
    MODELS_CONFIG_MAP[MODEL] = DeepseekV41Checks
    TokenizerRegistry.tokenizers["deepseek_v41"] = (f"{package}.chat", "DeepseekV41Tokenizer")
    RENDERER_REGISTRY.renderers["deepseek_v41"] = (f"{package}.chat", "DeepseekV41Renderer")
    register_backend(AttentionBackendEnum.CUSTOM, f"{package}.backend.DeepseekV41Backend")
    gates.install()
    balance_gates.install()
    cpu_config.install()
    logger.info("deepseek-v41-plugin serves %s (%s)", MODEL, why)


def untested() -> str | None:
    """What to say of a host whose version the tests do not run on, or None."""
    import vllm

    if vllm.__version__.split("+")[0] in TESTED_VERSIONS:
        return None
    return f"vLLM {vllm.__version__} is not tested, only {', '.join(TESTED_VERSIONS)} are"
