# SPDX-License-Identifier: Apache-2.0
"""DeepseekV41ForCausalLM: the model as vLLM's runner drives it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from ..model.loading import fill_dummy, load_checkpoint
from ..model.model import Model
from ..model.settings import Settings, Shards
from ..model.step import LayerPages, Step
from .caches import LayerCaches
from .hf_config import model_config_of
from .options import Options

logger = init_logger(__name__)


class DeepseekV41ForCausalLM(nn.Module):
    """Text model on the host's caches; the vision tower's tensors are accepted and left unread."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.vllm_config = vllm_config
        self.cfg = model_config_of(vllm_config.model_config.hf_config)
        settings = _settings(vllm_config)
        self.model = Model(self.cfg, settings)
        self.caches = nn.ModuleList(
            LayerCaches(f"model.layers.{plan.index}.attn", self.cfg, settings, plan, vllm_config)
            for plan in self.cfg.layers
        )
        self.ngram_size = self.cfg.engram_max_ngram_size if self.cfg.engram_layer_ids else 1
        if vllm_config.load_config.load_format == "dummy":
            fill_dummy(self.model)

    @staticmethod
    def get_model_state_cls():
        from .state import DeepseekV41ModelState

        return DeepseekV41ModelState

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input_ids, self.model.embed.weight)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors=None,
        inputs_embeds: torch.Tensor | None = None, ngrams: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, D] of the step in the forward context; rows past the real ones are zero."""
        step = self._step()
        if step is None:
            return self.model(input_ids, None, None)
        count = step.rows.count
        hidden = self.model(input_ids[:count], step, ngrams[:count])
        return nn.functional.pad(hidden, (0, 0, 0, input_ids.shape[0] - count))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_states).float()

    def _step(self) -> Step | None:
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
        return Step(metadata[self.caches[0].window.prefix].rows, pages)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stream the checkpoint shard by shard through mapped files; `weights` is not consumed, so
        that neither the Engram tables nor the draft's and the vision tower's tensors are read."""
        begin = time.perf_counter()
        load_checkpoint(self.model, checkpoint_directory(self.vllm_config))
        # The host times its own reader, which did not run: its line about seconds is to be ignored.
        logger.info("DeepSeek-V4.1 weights streamed in %.1f s", time.perf_counter() - begin)
        return {name for name, _ in self.named_parameters()}


def _settings(vllm_config: VllmConfig) -> Settings:
    options = Options.parse(vllm_config.additional_config)
    size = get_tensor_model_parallel_world_size()
    shards = Shards(get_tensor_model_parallel_rank(), size, _sum_over_ranks) if size > 1 else Shards()
    dtype = torch.float64 if options.exact else vllm_config.model_config.dtype
    return Settings(dtype, options.activation_quant, vllm_config.cache_config.cache_dtype, shards)


def _sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    # The host's own all-reduce has kernels for 16 and 32 bit types only; the exact mode needs 64.
    x = x.contiguous()
    torch.distributed.all_reduce(x, group=get_tp_group().device_group)
    return x


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
