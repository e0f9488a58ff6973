# SPDX-License-Identifier: Apache-2.0
"""Scheduled verification under the host's runner, which drives it as its own adaptive verification.

A step, in the runner's order:

    add_request         a slot of the request table has a new owner
    get_num_tokens      the budget, from confidences that are two steps old
    compact_batch       the CPU's idea of the batch: totals exact, the split among requests a guess
    reallocate_drafts   the split, on the device, from the newest confidences
    wants_draft         (the speculator asks) whether the draft pass is worth running
    record_confidences  what the draft pass says of its drafts

Steps without scheduled drafts begin at wants_draft.  Nothing here waits for the device but the read of
confidences that were copied two steps ago.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils import torch_utils

from ..kernels import verification as kernels
from ..verification import LastKnown, Plan, Profile, calibrated, plan
from ..verification.prior import Prior
from .host_copy import HostCopy, copy_stream

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


AGE = 2


class VerificationManager:
    """What the runner calls `adaptive_verification`.

    Budgets read confidences two steps old.  Those of the step before belong to the drafts that are to be
    verified: where drafts are sampled they depend on the draw, and a budget that saw them would favour
    some drafts over others, so that the output would no longer have the target's distribution.  Besides,
    a GPU may still be running that draft pass.
    Tensor parallel ranks see the same calls and the same confidences, and so choose the same budgets.
    """

    def __init__(
        self, req_states: RequestState, query_start_loc: torch.Tensor, num_bonus_tokens: int, max_total_logits: int,
        profile: Profile, *, always_draft: bool = False, returns: int = 3,
    ):
        """query_start_loc: the runner's own int32 [max_num_reqs + 1]; max_total_logits: of one chunk of the
        rejection sampler; always_draft: other ranks would wait in a draft pass; returns: how many values
        the host takes from `reallocate_drafts`."""
        self.req_states, self.query_start_loc, self.bonus = req_states, query_start_loc, num_bonus_tokens
        self.k = req_states.num_speculative_steps
        self.costs, self.always_draft, self.returns = profile.costs, always_draft, returns
        self.max_total_logits = max_total_logits
        slots, device = req_states.max_num_reqs, req_states.device
        self.inverse = None if profile.calibration is None else profile.calibration.inverse(device)
        self.plan: Plan | None = None  # of this step, when it has scheduled drafts
        self.drafts = 0  # that lie ready in this step
        self._rows: dict[str, tuple[int, int]] = {}  # request -> (rows that are no drafts, drafts that lie ready)
        self._ready = np.zeros(slots, dtype=np.int64)
        self._step = 0
        self._prior = Prior(self.k)
        self._known = LastKnown(slots, self._prior.value, AGE)
        self._fresh = torch.ones(slots, self.k, dtype=torch.float32, device=device)
        self._logit_start = torch.zeros_like(query_start_loc)
        self._stream = copy_stream(device)
        self._copies: deque[tuple[int, np.ndarray, np.ndarray, np.ndarray, HostCopy | None]] = deque()

    def batches_to_profile(self, capture_sizes: list[int]) -> tuple[()]:
        """None: the host would time steps on its graphs; our costs come from a file (`dsv41 profile-verify`)."""
        return ()

    def set_initial_cost_curves(self, samples: list) -> None:
        """See `batches_to_profile`."""

    def add_request(self, req_idx: int) -> None:
        self._known.prior = self._prior.value.astype(np.float32)
        self._known.reset(req_idx)
        self._ready[req_idx] = 0

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Rows of this step: all that are no drafts, and the budget.

        Of scheduled drafts only those count that a draft pass made; the scheduler asks for placeholders
        when a request is new, or when the pass was left out.
        """
        ids = list(num_tokens_per_req)
        slots = np.array([self.req_states.req_id_to_index[i] for i in ids], dtype=np.int64)
        placed = np.array([len(draft_tokens.get(i, ())) for i in ids], dtype=np.int64)
        base = np.fromiter(num_tokens_per_req.values(), dtype=np.int64, count=len(ids)) - placed
        computed, prefill = self.req_states.num_computed_tokens_np[slots], self.req_states.prefill_len.np[slots]
        drafts = np.minimum(placed, self._ready[slots])
        self.plan, self.drafts = self._choose(slots, base, drafts, computed + base >= prefill), int(drafts.sum())
        self._rows = {i: (b, d) for i, b, d in zip(ids, base.tolist(), drafts.tolist(), strict=True)}
        return int(base.sum()) + self.plan.budget

    def compact_batch(
        self, num_draft_tokens_per_req: np.ndarray, num_scheduled_tokens: np.ndarray, cu_num_logits_np: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows of each request, starts of logits) for the CPU: the budget as if the first requests got it.

        Requests without drafts come after those with drafts, so their places are exact.
        """
        placed = num_draft_tokens_per_req
        taken = np.clip(self.plan.budget - (np.cumsum(placed) - placed), 0, placed).astype(placed.dtype)
        starts = np.zeros_like(cu_num_logits_np)
        np.cumsum(taken + self.bonus, out=starts[1:])
        return num_scheduled_tokens - placed + taken, starts

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple:
        """(starts of logits, starts of rows, budget, and None where the host takes four), on the device."""
        budget, count = self.plan.budget, len(req_ids)
        table = np.array([self._rows[i] for i in req_ids], dtype=np.int32).T
        base, drafts = torch_utils.async_tensor_h2d(
            np.ascontiguousarray(table), device=idx_mapping.device, dtype=torch.int32
        )
        if budget == 0:
            lengths = torch.zeros_like(drafts)
        elif budget == self.drafts:
            lengths = drafts
        else:
            lengths = self.split(idx_mapping, drafts, budget)
        for starts, rows in ((self._logit_start, lengths + self.bonus), (self.query_start_loc, lengths + base)):
            starts[:1].zero_()
            torch.cumsum(rows, 0, dtype=starts.dtype, out=starts[1 : count + 1])
        self.query_start_loc[count + 1 :].fill_(int(table[0].sum()) + budget)
        return (self._logit_start[: count + 1], self.query_start_loc, budget, None)[: self.returns]

    def split(self, idx_mapping: torch.Tensor, drafts: torch.Tensor, budget: int) -> torch.Tensor:
        """Drafts to verify of each request, int32 [R]."""
        return kernels.lengths(self._fresh[idx_mapping], drafts, budget)

    def wants_draft(self, input_batch: InputBatch) -> bool:
        """Whether the draft pass after this step is expected to pay."""
        if self.plan is not None:
            return self.plan.draft
        slots, base = self._slots(input_batch), input_batch.num_scheduled_tokens[: input_batch.num_reqs]
        return self._choose(slots, base, np.zeros(len(slots), dtype=np.int64), self._samples(input_batch)).draft

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """confidence_probs float32 [>= R, k], of the draft pass if one ran; ends the step."""
        slots, samples = self._slots(input_batch), self._samples(input_batch)
        draft = self.wants_draft(input_batch)
        copy = None
        if draft:
            fresh = confidence_probs[: input_batch.num_reqs].clone()  # the next pass writes into the same buffer
            if self.inverse is not None:
                fresh = calibrated(torch.logit(fresh), self.inverse)
            self._fresh[input_batch.idx_mapping] = fresh
            copy = HostCopy(fresh, self._stream)
        self._copies.append((self._step, slots, self._known.owners(slots), samples, copy))
        # Drafts after a part of a prompt predict what is known: the host does not schedule them.
        self._ready[slots] = np.where(samples, self.k, 0) if draft else 0
        self._step += 1
        self.plan, self.drafts = None, 0

    def _choose(self, slots: np.ndarray, base: np.ndarray, drafts: np.ndarray, samples: np.ndarray) -> Plan:
        self._receive()
        return plan(
            self.costs, self._known.read(self._step, slots), drafts, base_rows=int(base.sum()),
            sampling=int(samples.sum()), potential=np.where(samples, self.k, 0),
            limit=self.max_total_logits - len(slots) * self.bonus, always_draft=self.always_draft,
        )

    def _receive(self) -> None:
        """Hand over the confidences of step - age, which are there, and none that came since."""
        while self._copies and self._copies[0][0] <= self._step - self._known.age:
            step, slots, owners, samples, copy = self._copies.popleft()
            slots, owners = slots[samples], owners[samples]
            if copy is None:
                self._prior.wait()
                confidence = np.tile(self._prior.value, (len(slots), 1))
            else:
                confidence = copy.wait()[samples]
                self._prior.see(confidence)
            self._known.put(step, slots, owners, confidence)

    def _slots(self, input_batch: InputBatch) -> np.ndarray:
        return np.asarray(input_batch.idx_mapping_np[: input_batch.num_reqs])

    def _samples(self, input_batch: InputBatch) -> np.ndarray:
        """Which requests emit a token in this step, bool [R]."""
        count, drafts = input_batch.num_reqs, input_batch.num_draft_tokens_per_req
        rows = input_batch.num_scheduled_tokens[:count] - (0 if drafts is None else drafts[:count])
        return input_batch.num_computed_tokens_np[:count] + rows >= input_batch.prefill_len_np[:count]
