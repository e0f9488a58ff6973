# SPDX-License-Identifier: Apache-2.0
"""The host's DSpark speculator, which may leave the draft pass out, counts, and has an exact mode."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from .metrics import StepCounts
from .options import Options
from .verification import VerificationManager


class Speculator(DSparkSpeculator):
    """`manager`: the scheduled verification, once the caches exist; None: all drafts are verified."""

    manager: VerificationManager | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        if Options.parse(vllm_config.additional_config).exact:
            # The draft's context features, which the host holds in the model's dtype.
            self.hidden_states = self.hidden_states.double()
        self.counts = StepCounts.of(vllm_config, device, get_tensor_model_parallel_rank())
        self._verdict: tuple[torch.Tensor, torch.Tensor] | None = None
        self.drafted = True  # whether the last step had a draft pass

    def capture(self) -> None:
        """Steps that warm the host up come before: what they left out or counted is not to stay."""
        self.drafted = True
        self.counts.reset()
        super().capture()

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Called before `propose` in every step that samples, and in no dummy run."""
        super().observe_verification(idx_mapping, num_sampled, num_rejected)
        self._verdict = num_sampled, num_rejected

    def propose(self, input_batch: InputBatch, *args, **kwargs) -> torch.Tensor:
        verdict, self._verdict = self._verdict, None
        draft = self.drafted = verdict is None or self.manager is None or self.manager.wants_draft(input_batch)
        if verdict is not None:
            budget, drafted = input_batch.num_draft_tokens, None
            if self.manager is not None:
                budget, drafted = self.manager.plan.budget if self.manager.plan else 0, self.manager.drafts
            self.counts.add(*verdict, budget, drafted, draft)
        if not draft:
            # vLLM 0.33 then stores the context rows, which later passes need, and no more; 0.32 comes to the method below.
            kwargs["num_speculative_tokens"] = 0
        return super().propose(input_batch, *args, **kwargs)

    def _generate_draft(self, *args, **kwargs) -> None:
        if self.drafted:
            super()._generate_draft(*args, **kwargs)
