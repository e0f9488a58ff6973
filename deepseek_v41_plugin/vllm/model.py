# SPDX-License-Identifier: Apache-2.0
"""DeepseekV41ForCausalLM: the model as vLLM's runner drives it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import SupportsEagle3

from ..model.bounded import bounded
from ..model.loading import fill_dummy, load_checkpoint
from ..model.model import Model
from ..model.prepare import prepare
from ..model.settings import Settings, Shards
from ..model.step import LayerPages, Step
from .caches import LayerCaches
from .expert_parallel import expert_ranks, sum_over
from .hf_config import model_config_of
from .options import Options

logger = init_logger("vllm.dsv41")


class TargetCore(Model):
    """The core's model under the name by which the host finds the embedding for the draft."""

    @property
    def embed_tokens(self) -> nn.Module:
        return self.embed


class DeepseekV41ForCausalLM(nn.Module, SupportsEagle3):
    """Text model on the host's caches; the vision tower's tensors are accepted and left unread."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.vllm_config = vllm_config
        self.cfg = model_config_of(vllm_config.model_config.hf_config)
        settings = settings_of(vllm_config, vllm_config.parallel_config.eplb_config.num_redundant_experts)
        self.model = TargetCore(self.cfg, settings)
        self.features: tuple[int, ...] = ()
        self.caches = nn.ModuleList(
            LayerCaches(f"model.layers.{plan.index}.attn", self.cfg, settings, plan, vllm_config)
            for plan in self.cfg.layers
        )
        self.ngram_size = self.cfg.engram_max_ngram_size if self.cfg.engram_layer_ids else 1
        if vllm_config.load_config.load_format == "dummy":
            fill_dummy(self.model)
            prepare(self.model)

    @staticmethod
    def get_model_state_cls():
        from .state import DeepseekV41ModelState

        return DeepseekV41ModelState

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """The layers at whose entry `forward` takes features for the draft."""
        self.features = tuple(layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.cfg.dspark_target_layer_ids

    @property
    def lm_head(self) -> nn.Module:
        return self.model.head

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input_ids, self.model.embed.weight)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors=None,
        inputs_embeds: torch.Tensor | None = None, memory: list[torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, D] of the step in the forward context; rows past the real ones are zero.

        memory: see `Model.recall`.  With `features` also those of each layer [T, D].
        """
        step = self._step(positions)
        count = input_ids.shape[0] if step is None else step.rows.count
        memory = memory and [x[:count] for x in memory]
        hidden, features = self.model(input_ids[:count], step, memory, self.features)
        hidden, *features = (
            nn.functional.pad(x, (0, 0, 0, input_ids.shape[0] - count)) for x in (hidden, *features)
        )
        return (hidden, features) if self.features else hidden

    def standing_memory(self, rows: int) -> list[torch.Tensor]:
        """Room for Engram's memory of `rows` rows, for CUDA graphs."""
        weight = self.model.embed.weight
        width = self.cfg.engram_columns * self.cfg.engram_head_dim
        return [torch.zeros(rows, width, dtype=self.model.settings.dtype, device=weight.device) for _ in self.cfg.engram_layer_ids]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_states).float()

    def _step(self, positions: torch.Tensor) -> Step | None:
        """The step's rows and pages; None while the host profiles without caches."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return None
        pages = {}
        for index, caches in enumerate(self.caches):
            pages[index] = LayerPages(*(
                cache and metadata[cache.prefix].pages(cache.kv_cache)
                for cache in (caches.window, caches.compressed, caches.index, caches.ring)
            ))
        group = metadata[self.caches[0].window.prefix]
        return bounded(Step(group.rows(positions), pages), self.cfg.last_kv_source, group.plan.bounds)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stream the checkpoint shard by shard through mapped files; `weights` is not consumed, so
        that neither the Engram tables nor the draft's and the vision tower's tensors are read."""
        begin = time.perf_counter()
        load_checkpoint(self.model, checkpoint_directory(self.vllm_config))
        prepare(self.model)
        # The host times its own reader, which did not run: its line about seconds is to be ignored.
        logger.info("DeepSeek-V4.1 weights streamed in %.1f s", time.perf_counter() - begin)
        return {name for name, _ in self.named_parameters()}


def settings_of(vllm_config: VllmConfig, redundant: int) -> Settings:
    """`redundant`: this model's experts beyond the logical ones."""
    options = Options.parse(vllm_config.additional_config)
    size = get_tensor_model_parallel_world_size()
    shards = Shards(get_tensor_model_parallel_rank(), size, sum_over(get_tp_group)) if size > 1 else Shards()
    dtype = torch.float64 if options.exact else vllm_config.model_config.dtype
    return Settings(
        dtype, options.activation_quant, vllm_config.cache_config.cache_dtype, shards, options.batch_invariant,
        expert_ranks(vllm_config.parallel_config, redundant), uniform_routing=envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY == "uniform_random",
    )


def checkpoint_directory(vllm_config: VllmConfig) -> Path:
    """The local folder of the model, downloaded through the hub's cache when it is a repository name."""
    model = vllm_config.model_config.model
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(
        model, revision=vllm_config.model_config.revision, cache_dir=vllm_config.load_config.download_dir,
        allow_patterns=["*.safetensors", "*.json"],
    ))
