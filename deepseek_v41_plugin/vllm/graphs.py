# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: which kind the host is to capture, and whether our steps can be captured at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..kernels.registry import OPS
from ..model.prepare import why_plain
from ..model.settings import Settings
from .hf_config import model_config_of
from .options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dsv41")


def choose_mode(vllm_config: VllmConfig) -> None:
    """Whole decode steps as graphs, steps with prompts eagerly.  No device is looked at: the API server comes here too."""
    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    if model.enforce_eager:
        return
    if current_platform.is_cpu():
        model.enforce_eager = True
        logger.info("DeepSeek-V4.1 runs eagerly on a CPU")
        return
    asked = compilation.cudagraph_mode
    if asked in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY):
        return
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    if asked is not None:
        logger.info("cudagraph_mode %s: DeepSeek-V4.1 has no pieces to capture, only decode steps as a whole", asked.name)


def why_no_graphs(vllm_config: VllmConfig) -> str | None:
    """For a worker: one sentence, or None where graphs are possible."""
    options, model = Options.parse(vllm_config.additional_config), vllm_config.model_config
    dtype = torch.float64 if options.exact else model.dtype
    device = torch.device(vllm_config.device_config.device_type)
    if plain := why_plain(Settings(dtype, options.activation_quant, batch_invariant=options.batch_invariant), device):
        return f"{plain}; of the plain ops some wait for the device"
    parallel = vllm_config.parallel_config
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        return "data parallel ranks tell each other their rows on the host, which has not been tried with graphs"
    cfg = model_config_of(model.hf_config)
    for field in ("hidden_size", "moe_intermediate_size"):
        if getattr(cfg, field) % 128:
            return f"{field} = {getattr(cfg, field)}: the experts' kernel takes multiples of 128"
    waiting = [op.name for op in OPS.values() if not op.choose(device).graphs]
    if waiting:
        return f"the chosen implementations of {', '.join(waiting)} wait for the device"
    return None
