# SPDX-License-Identifier: Apache-2.0
"""Cost profiles at launch: what one is tied to, and the refusal of another machine's."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import deepseek_v41_plugin

from ..kernels import arch
from ..verification import Curve, Profile, ProfileError, StepCosts
from .options import OptionError, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The worker extension of `dsv41 profile-verify`: an engine that has it measures, and needs no profile.
MEASURING = "deepseek_v41_plugin.vllm.measure.Measuring"
OPTION = "additional_config.dsv41.verify_profile"


def scheduled(vllm_config: VllmConfig) -> bool:
    """Whether verification was asked to be scheduled."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.enable_adaptive_verification


def measuring(vllm_config: VllmConfig) -> bool:
    return vllm_config.parallel_config.worker_extension_cls == MEASURING


def identity(vllm_config: VllmConfig) -> dict[str, str | int | None]:
    """What step costs depend on."""
    import vllm
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    raw = json.dumps(model.hf_config.dsv41_raw, sort_keys=True).encode()
    capability = current_platform.get_device_capability()
    options = Options.parse(vllm_config.additional_config)
    return {
        "device": arch.detect().name if current_platform.is_cpu() else current_platform.get_device_name(),
        "sm": None if capability is None else f"SM{capability.major}{capability.minor}",
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "model": hashlib.sha256(raw).hexdigest()[:16],
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "dtype": "float64" if options.exact else str(model.dtype).removeprefix("torch."),
        "activation_quant": options.activation_quant,
        "vllm": vllm.__version__,
        "plugin": deepseek_v41_plugin.__version__,
        "num_speculative_tokens": vllm_config.speculative_config.num_speculative_tokens,
    }


def check_profile(vllm_config: VllmConfig) -> None:
    """Raise if verification is to be scheduled without costs, or with those of something else."""
    path = Options.parse(vllm_config.additional_config).verify_profile
    if not scheduled(vllm_config):
        if path is not None:
            raise OptionError(
                f"{OPTION}: given, but nothing is scheduled. Add \"enable_adaptive_verification\": true to"
                " speculative_config, or remove the option"
            )
        return
    if vllm_config.speculative_config.method != "dspark":
        raise OptionError(
            f"speculative_config.enable_adaptive_verification: {vllm_config.speculative_config.method} drafts have no"
            " confidences. Use method dspark, or remove it"
        )
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        raise OptionError("enable_batch_sharded_sampling: not supported with scheduled verification. Remove it")
    if measuring(vllm_config):
        return
    if path is None:
        raise OptionError(
            f"{OPTION}: missing, but speculative_config.enable_adaptive_verification needs the costs of a step. "
            "Measure them with `dsv41 profile-verify MODEL -o FILE`, or remove enable_adaptive_verification"
        )
    try:
        Profile.load(path, identity(vllm_config))
    except ProfileError as error:
        raise OptionError(f"{OPTION}: {error}") from None


def load_profile(vllm_config: VllmConfig) -> Profile:
    """The profile, from the file of tensor parallel rank 0; its identity was checked at launch."""
    if measuring(vllm_config):
        return Profile({}, StepCosts(Curve(((1, 1.0),)), Curve(((1, 1e-9),))))
    from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group

    profile = None
    if get_tensor_model_parallel_rank() == 0:
        profile = Profile.load(Options.parse(vllm_config.additional_config).verify_profile)
    return get_tp_group().broadcast_object(profile, src=0)
