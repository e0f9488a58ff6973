# SPDX-License-Identifier: Apache-2.0
"""An engine that measures its steps: forced budgets, and the device waited for around every pass.

`dsv41 profile-verify` names `Measuring` as the host's worker extension, and calls its methods on all ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..verification import Plan
from .speculator import Speculator
from .verification import VerificationManager

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


def now_ms(device: torch.device) -> float:
    """Wall time once all that was launched on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * time.perf_counter()


class MeasuringManager(VerificationManager):
    """Takes `force` drafts (None: all) and lists what splitting them costs."""

    force: int | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trim_ms: list[float] = []
        self.begin: tuple[float, int, int] | None = None  # ms, rows, requests of a step of decodes

    def get_num_tokens(self, num_tokens_per_req: dict, draft_tokens: dict) -> int:
        rows = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        if all(base == 1 for base, _ in self._rows.values()):
            self.begin = now_ms(self.req_states.device), rows, len(self._rows)
        return rows

    def split(self, idx_mapping: torch.Tensor, drafts: torch.Tensor, budget: int) -> torch.Tensor:
        begin = now_ms(idx_mapping.device)
        lengths = super().split(idx_mapping, drafts, budget)
        self.trim_ms.append(now_ms(idx_mapping.device) - begin)
        return lengths

    def known_of(self, idx_mapping: torch.Tensor) -> np.ndarray:
        """Confidences float32 [R, k] of the drafts that were just verified."""
        return self._fresh[idx_mapping].cpu().numpy()

    def _choose(self, slots: np.ndarray, base: np.ndarray, drafts: np.ndarray, samples: np.ndarray) -> Plan:
        self._receive()
        most = min(int(drafts.sum()), max(self.max_total_logits - len(slots) * self.bonus, 0))
        return Plan(most if self.force is None else min(most, self.force), True, 0.0, 0.0, 0.0, 0.0)


class MeasuringSpeculator(Speculator):
    """Lists (rows, requests, ms) of the target, (requests, ms) of the draft pass, and what was accepted."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.verify: list[tuple[int, int, float]] = []
        self.draft: list[tuple[int, float]] = []
        self.blocks: list[tuple[list, list, list, list]] = []  # slots, confidences, verified, accepted of a step

    def observe_verification(self, idx_mapping, num_sampled, num_rejected) -> None:
        super().observe_verification(idx_mapping, num_sampled, num_rejected)
        if self.manager is None or self.manager.begin is None:
            return
        begin, rows, requests = self.manager.begin
        self.manager.begin = None
        self.verify.append((rows, requests, now_ms(self.device) - begin))
        sampled, rejected = num_sampled.cpu().numpy(), num_rejected.cpu().numpy()
        known = self.manager.known_of(idx_mapping)
        self.blocks.append((
            idx_mapping.tolist(), known.tolist(), (sampled + rejected - 1).tolist(), (sampled - 1).tolist(),
        ))

    def propose(self, input_batch: InputBatch, *args, **kwargs) -> torch.Tensor:
        """Timed from outside, since a CUDA graph holds the whole of it."""
        begin = now_ms(self.device)
        drafts = super().propose(input_batch, *args, **kwargs)
        if self.drafted:
            self.draft.append((input_batch.num_reqs, now_ms(self.device) - begin))
        return drafts


class Measuring:
    """Mixed into the host's worker."""

    def dsv41_force(self, budget: int | None) -> None:
        self.model_runner.speculator.manager.force = budget

    def dsv41_measured(self) -> dict[str, list]:
        """What this rank measured since the last call; it is forgotten here."""
        speculator = self.model_runner.speculator
        manager = speculator.manager
        found = {
            "verify": speculator.verify, "draft": speculator.draft, "trim": manager.trim_ms, "blocks": speculator.blocks,
        }
        speculator.verify, speculator.draft, manager.trim_ms, speculator.blocks = [], [], [], []
        return found
