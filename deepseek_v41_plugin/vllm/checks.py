# SPDX-License-Identifier: Apache-2.0
"""What is refused before a weight is read, and what the host is told about the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ..config import ModelConfig
from ..model.loading import check_checkpoint
from ..model.settings import shards_problem
from .hf_config import model_config_of
from .options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class Unsupported(ValueError):
    """The host was asked for something this plugin does not do."""


class DeepseekV41Checks(VerifyAndUpdateConfig):
    """The host's hook for this architecture, called as its config is built in every process."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        cfg = model_config_of(vllm_config.model_config.hf_config)
        Options.parse(vllm_config.additional_config)
        check_parallel(cfg, vllm_config)
        check_features(vllm_config)
        if not vllm_config.model_config.enforce_eager:
            # The plain kernels read counts back to the host, which no graph can capture.
            vllm_config.model_config.enforce_eager = True
            logger.info("DeepSeek-V4.1 runs eagerly: the plugin's kernels cannot be captured in graphs yet")
        if not vllm_config.use_v2_model_runner:
            raise Unsupported(
                "model runner: V1 keeps no token history for Engram. Unset VLLM_USE_V2_MODEL_RUNNER; on a CPU"
                " host also DSV41_CPU_SETUP, and name dsv41_cpu if VLLM_PLUGINS is set"
            )
        directory = Path(vllm_config.model_config.model)
        if directory.is_dir() and vllm_config.load_config.load_format != "dummy":
            for name in check_checkpoint(cfg, directory)[2]:
                logger.warning("Tensor %s is not part of DeepSeek-V4.1 and is ignored", name)


def check_parallel(cfg: ModelConfig, vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("pipeline_parallel_size: stages are not supported by DSV41_IMPL=plugin. Use tensor parallel ranks")
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field) > 1:
            raise Unsupported(f"{field}: contexts are not split over ranks. Use tensor parallel ranks")
    if parallel.use_ubatching:
        raise Unsupported("enable_dbo: microbatches are not supported. Remove it")
    if problem := shards_problem(cfg, parallel.tensor_parallel_size):
        raise Unsupported(f"tensor_parallel_size: {problem}")


def check_features(vllm_config: VllmConfig) -> None:
    # Not at the top: plugins are registered before the host is ready for its attention modules.
    from .backend import DeepseekV41Backend

    if vllm_config.model_config.dtype not in DeepseekV41Backend.supported_dtypes:
        raise Unsupported(f"dtype: {vllm_config.model_config.dtype} has too little range. Use bfloat16 or float32")
    if vllm_config.model_config.runner_type != "generate":
        raise Unsupported(f"runner: {vllm_config.model_config.runner_type} is not supported. Use generate")
    if vllm_config.model_config.enable_prompt_embeds:
        raise Unsupported("enable_prompt_embeds: Engram needs token ids. Remove it")
    if vllm_config.model_config.quantization is not None:
        raise Unsupported(f"quantization: {vllm_config.model_config.quantization} cannot be applied to DeepSeek-V4.1's own formats. Remove --quantization")
    block = vllm_config.cache_config.block_size
    if block and block % 8:
        raise Unsupported(f"block_size: {block} is not a multiple of 8. Use 16 or more (a page holds whole words of every record)")
    if vllm_config.cache_config.cache_dtype not in DeepseekV41Backend.supported_kv_cache_dtypes:
        raise Unsupported(f"kv_cache_dtype: {vllm_config.cache_config.cache_dtype} is not supported. Use auto (FP8 window, FP4 compressed rows and index keys) or fp8_ds_mla")
    if vllm_config.lora_config is not None:
        raise Unsupported("enable_lora: LoRA is not supported for DeepSeek-V4.1. Remove it")
    if vllm_config.load_config.load_format not in ("auto", "hf", "safetensors", "dummy"):
        raise Unsupported(f"load_format: {vllm_config.load_config.load_format} is not supported. Use auto, safetensors or dummy")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method == "dspark":
        raise Unsupported("speculative_config.method: dspark is not served by the plugin yet. Remove --speculative-config or set DSV41_IMPL=host")
