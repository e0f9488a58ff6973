# SPDX-License-Identifier: Apache-2.0
"""The host's doors to the speculator and to adaptive verification: ours for our model, else the host's.

The runner takes these functions into its own namespace, and must not be imported before its worker has
prepared it.  So the speculator's door is changed where it is defined, and the rest when it is first used.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from . import MODEL, balance_gates, metrics
from .patching import wrap
from .profiles import check_profile, load_profile, measuring, scheduled

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.states import RequestState

    from .speculator import Speculator

PATCHES = (
    "vllm.config.vllm.VllmConfig._validate_adaptive_verification",
    "vllm.v1.worker.gpu.spec_decode.init_speculator",
    "vllm.v1.worker.gpu.model_runner.maybe_create_adaptive_verification_manager",
    "vllm.v1.worker.gpu.model_runner.resolve_adaptive_cudagraph_mode",
    "vllm.v1.worker.gpu.spec_decode.dspark.utils.dspark_draft_supports_eplb",
)

RUNNER = "vllm.v1.worker.gpu.model_runner"
DSPARK = "vllm.v1.worker.gpu.spec_decode.dspark.utils"

# By id of the runner's RequestState, which lives as long as the speculator does.
_speculators: WeakValueDictionary[int, Speculator] = WeakValueDictionary()


def ours(vllm_config: VllmConfig) -> bool:
    return vllm_config.model_config is not None and vllm_config.model_config.architecture == MODEL


def install() -> None:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu import spec_decode

    wrap(VllmConfig, "_validate_adaptive_verification", _validate)
    wrap(spec_decode, "init_speculator", _init_speculator)


def _validate(original, vllm_config: VllmConfig) -> None:
    """The host demands full CUDA graphs, to time its steps on; our costs come from a file.

    Called as a config is built, in the process that serves /metrics too.
    """
    if not ours(vllm_config):
        balance_gates.refuse(vllm_config)
        original(vllm_config)
        return
    check_profile(vllm_config)
    if vllm_config.speculative_config is not None or vllm_config.parallel_config.enable_eplb:
        metrics.expose(vllm_config)


def _init_speculator(original, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
    if not ours(vllm_config) or vllm_config.speculative_config.method != "dspark":
        return original(vllm_config, device, req_states)
    from .speculator import Speculator

    wrap(importlib.import_module(DSPARK), "dspark_draft_supports_eplb", lambda original, config: True)
    if scheduled(vllm_config):
        runner = importlib.import_module(RUNNER)
        wrap(runner, "maybe_create_adaptive_verification_manager", _create_manager)
        wrap(runner, "resolve_adaptive_cudagraph_mode", _resolve_mode)
    cls = Speculator
    if measuring(vllm_config):
        from .measure import MeasuringSpeculator as cls
    speculator = _speculators[id(req_states)] = cls(vllm_config, device)
    return speculator


def _create_manager(original, **given):
    """A VerificationManager, known to the speculator of the same requests too."""
    vllm_config, speculator = given["vllm_config"], _speculators.get(id(given["req_states"]))
    if speculator is None or not given["enable_adaptive_verification"]:
        return original(**given)
    from .verification import VerificationManager

    cls = VerificationManager
    if measuring(vllm_config):
        from .measure import MeasuringManager as cls
    speculator.manager = cls(
        given["req_states"], given["query_start_loc"], given["num_bonus_tokens"], given["max_total_logits"],
        load_profile(vllm_config),
        # Data parallel ranks agree on shapes in a draft pass: none may leave it out alone.
        always_draft=vllm_config.parallel_config.data_parallel_size > 1,
        returns=4 if "copy_admitted_drafts_to_host" in inspect.signature(original).parameters else 3,
    )
    return speculator.manager


def _resolve_mode(original, mode, **given):
    """The host asserts full graphs; a model that runs eagerly has none to choose."""
    return original(mode, **given) if mode.has_full_cudagraphs() else mode
