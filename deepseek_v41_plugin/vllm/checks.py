# SPDX-License-Identifier: Apache-2.0
"""What is refused before a weight is read, and what the host is told about the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ..config import ModelConfig
from ..eplb.maps import valid_redundancy
from ..model.loading import check_checkpoint
from ..model.settings import shards_problem
from .graphs import choose_mode
from .hf_config import model_config_of
from .options import Options, draft_eplb_config, replay_policy
from .transfer import take_over

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.parallel import EPLBConfig

logger = init_logger("vllm.dsv41")


class Unsupported(ValueError):
    """The host was asked for something this plugin does not do."""


class DeepseekV41Checks(VerifyAndUpdateConfig):
    """The host's hook for this architecture, called as its config is built in every process."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        cfg = model_config_of(vllm_config.model_config.hf_config)
        check_parallel(cfg, vllm_config)
        check_features(vllm_config)
        check_draft(cfg, vllm_config)
        replay_policy(vllm_config, cfg)
        choose_mode(vllm_config)
        if vllm_config.kv_transfer_config is not None:
            take_over(vllm_config.kv_transfer_config)
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
    parallel, options = vllm_config.parallel_config, Options.parse(vllm_config.additional_config)
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("pipeline_parallel_size: stages are not supported by DSV41_IMPL=plugin. Use tensor parallel ranks")
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field) > 1:
            raise Unsupported(f"{field}: contexts are not split over ranks. Use tensor parallel ranks")
    if parallel.use_ubatching:
        raise Unsupported("enable_dbo: microbatches are not supported. Remove it")
    over = parallel.enable_expert_parallel and parallel.tensor_parallel_size * parallel.data_parallel_size > 1
    if problem := shards_problem(cfg, parallel.tensor_parallel_size, experts=not over):
        raise Unsupported(f"tensor_parallel_size: {problem}")
    ranks = parallel.tensor_parallel_size * (parallel.data_parallel_size if over else 1)
    if ranks > 2 and options.batch_invariant:
        raise Unsupported(
            "additional_config.dsv41.batch_invariant: the order of a sum over more than 2 ranks depends on its size. Use tensor_parallel_size 1 or 2"
            " (with expert parallelism, 2 ranks in all)"
        )
    if over:
        check_experts(cfg, vllm_config, ranks)
    if not parallel.enable_eplb:
        for name in (vllm_config.additional_config or {}).get("dsv41", {}):
            if "eplb" in name:
                raise Unsupported(f"additional_config.dsv41.{name}: experts are not balanced. Add --enable-eplb, or remove it")


def check_experts(cfg: ModelConfig, vllm_config: VllmConfig, ranks: int) -> None:
    """Physical experts in equal parts over the expert parallel ranks, of target and draft each."""
    parallel, options = vllm_config.parallel_config, Options.parse(vllm_config.additional_config)
    if parallel.enable_elastic_ep:
        raise Unsupported("enable_elastic_ep: ranks cannot come and go. Remove it")
    if parallel.expert_placement_strategy != "linear":
        raise Unsupported(f"expert_placement_strategy: {parallel.expert_placement_strategy} is not supported. Use linear; --enable-eplb moves experts")
    if parallel.enable_eplb and options.batch_invariant:
        raise Unsupported("enable_eplb: an expert that moves changes the order of a sum. Remove it, or additional_config.dsv41.batch_invariant")
    if parallel.enable_eplb:
        check_balance(parallel.eplb_config, options)
    asked = [("eplb_config", "n_routed_experts", parallel.eplb_config.num_redundant_experts)]
    own, speculative = draft_eplb_config(parallel, options), vllm_config.speculative_config
    if speculative is None or speculative.method != "dspark":
        if options.draft_eplb_config:
            raise Unsupported('additional_config.dsv41.draft_eplb_config: there is no draft. Add --speculative-config with the method dspark, or remove it')
    else:
        asked.append(("additional_config.dsv41.draft_eplb_config", "dspark_n_routed_experts", own.num_redundant_experts))
    for where, experts, redundant in asked:
        total = getattr(cfg, experts) + redundant
        if total % ranks:
            nearest = " or ".join(map(str, valid_redundancy(getattr(cfg, experts), redundant, ranks)))
            eplb = "" if parallel.enable_eplb else " with --enable-eplb"
            raise Unsupported(
                f"{where}.num_redundant_experts: {experts} = {total - redundant} and {redundant} redundant cannot be cut over {ranks} ranks. Use {nearest}{eplb}"
            )


def check_balance(config: EPLBConfig, options: Options) -> None:
    for name in ("enable_migration_batching", "log_balancedness"):
        if getattr(config, name):
            logger.warning_once(f"eplb_config.{name} is about the host's own balancing and not used; each rebalance is logged")
    where, device = "additional_config.dsv41", current_platform.device_type
    if {"symm_mem": "cuda", "shm": "cpu"}.get(options.eplb_transport, device) != device:
        raise Unsupported(f"{where}.eplb_transport: {options.eplb_transport} cannot hold tensors of device type {device}. Use auto")
    if options.eplb_record and Path(options.eplb_record).suffix != ".npz":
        raise Unsupported(f"{where}.eplb_record: {options.eplb_record!r} does not end with .npz. Use {options.eplb_record}.npz")
    if options.eplb_record and not Path(options.eplb_record).absolute().parent.is_dir():
        raise Unsupported(f"{where}.eplb_record: the folder of {options.eplb_record!r} does not exist. Create it")
    if options.eplb_slack and options.eplb_policy != "fewest_moves":
        raise Unsupported(f"{where}.eplb_slack: {options.eplb_policy} moves as it likes. Remove it, or use the policy fewest_moves")


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
    if (strategy := envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY) not in ("", "uniform_random"):
        raise Unsupported(f"VLLM_MOE_ROUTING_SIMULATION_STRATEGY: {strategy} is not supported. Use uniform_random, or unset it")
    if vllm_config.lora_config is not None:
        raise Unsupported("enable_lora: LoRA is not supported for DeepSeek-V4.1. Remove it")
    if vllm_config.load_config.load_format not in ("auto", "hf", "safetensors", "dummy"):
        raise Unsupported(f"load_format: {vllm_config.load_config.load_format} is not supported. Use auto, safetensors or dummy")


def check_draft(cfg: ModelConfig, vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "dspark":
        return
    if not cfg.num_nextn_predict_layers:
        raise Unsupported("speculative_config.method: dspark needs draft stages, and this checkpoint has none. Remove --speculative-config")
    if speculative.num_speculative_tokens > cfg.dspark_block_size:
        raise Unsupported(
            f"speculative_config.num_speculative_tokens: {speculative.num_speculative_tokens} is more than the"
            f" {cfg.dspark_block_size} tokens of a draft block. Use {cfg.dspark_block_size} or fewer"
        )
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if speculative.draft_tensor_parallel_size not in (None, ranks):
        raise Unsupported(f"speculative_config.draft_tensor_parallel_size: the draft is cut as the target. Use {ranks} or leave it out")
    if not vllm_config.parallel_config.enable_expert_parallel and cfg.dspark_n_routed_experts % ranks:
        raise Unsupported(f"tensor_parallel_size: {ranks} does not divide dspark_n_routed_experts = {cfg.dspark_n_routed_experts}. Use a size that divides it")
