# SPDX-License-Identifier: Apache-2.0
"""The manager under a stand-in for the host's runner: budgets, splits, ages, passes left out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the manager uses the host's copies")

from deepseek_v41_plugin.verification import Calibration, Curve, Profile, StepCosts, plan
from deepseek_v41_plugin.verification.prior import HORIZON, Prior
from deepseek_v41_plugin.vllm import verification
from deepseek_v41_plugin.vllm.verification import VerificationManager

K, SLOTS = 3, 12
FLAT = StepCosts(Curve(((1, 10.0), (1000, 10.0))), Curve(((1, 0.1),)))
STEEP = StepCosts(Curve(((1, 10.0), (8, 10.0), (100, 40.0))), Curve(((1, 0.1),)), 0.01)
PROHIBITIVE = StepCosts(Curve(((1, 1.0), (1000, 1000.0))), Curve(((1, 50.0),)))


class Runner:
    """Calls a manager as the host's runner does, and keeps what it was told."""

    def __init__(self, costs, calibration=None, max_total_logits=10_000, **options):
        self.states = SimpleNamespace(
            max_num_reqs=SLOTS, num_speculative_steps=K, device=torch.device("cpu"), req_id_to_index={},
            num_computed_tokens_np=np.zeros(SLOTS, np.int32), prefill_len=SimpleNamespace(np=np.zeros(SLOTS, np.int32)),
        )
        self.start = torch.full((SLOTS + 1,), -7, dtype=torch.int32)
        profile = Profile({}, costs, calibration)
        self.manager = VerificationManager(self.states, self.start, 1, max_total_logits, profile, **options)

    def add(self, request: str, slot: int, prompt: int, computed: int = 0) -> None:
        self.states.req_id_to_index[request] = slot
        self.states.prefill_len.np[slot], self.states.num_computed_tokens_np[slot] = prompt, computed
        self.manager.add_request(slot)

    def step(self, scheduled: dict[str, tuple[int, int]], confidence: np.ndarray | None = None):
        """scheduled: request -> (rows that are no drafts, drafts).  confidence [requests, K] in that order."""
        order = sorted(scheduled, key=lambda r: not scheduled[r][1])
        index = np.array([self.states.req_id_to_index[r] for r in order])
        placed = np.array([scheduled[r][1] for r in order], np.int32)
        rows = np.array([sum(scheduled[r]) for r in order], np.int32)
        seen = SimpleNamespace(budget=None, lengths=np.zeros(len(order), int), order=order)
        if placed.any():
            drafts = {r: [-1] * d for r, (_, d) in scheduled.items() if d}
            seen.rows = self.manager.get_num_tokens({r: sum(scheduled[r]) for r in scheduled}, drafts)
            logits = np.concatenate(([0], np.cumsum(placed + 1))).astype(np.int32)
            seen.cpu_rows, seen.cpu_logits = self.manager.compact_batch(placed, rows, logits)
            seen.logits, start, seen.budget, *rest = self.manager.reallocate_drafts(order, torch.from_numpy(index))
            assert start is self.start and rest == [None] * (self.manager.returns - 3)
            seen.start = start[: len(order) + 1].clone()
            seen.lengths = seen.start.diff().numpy() - (rows - placed)
            assert (start[len(order) + 1 :] == seen.rows).all()
        batch = SimpleNamespace(
            num_reqs=len(order), idx_mapping_np=index, idx_mapping=torch.from_numpy(index), num_scheduled_tokens=rows,
            num_draft_tokens_per_req=placed if placed.any() else None,
            num_computed_tokens_np=self.states.num_computed_tokens_np[index],
            prefill_len_np=self.states.prefill_len.np[index],
        )
        seen.draft, seen.ready = self.manager.wants_draft(batch), self.manager.drafts
        table = np.zeros((SLOTS, K), np.float32)
        if confidence is not None:
            table[: len(order)] = [confidence[list(scheduled).index(r)] for r in order]
        self.manager.record_confidences(torch.from_numpy(table), batch)
        for r, at in zip(order, index, strict=True):
            self.states.num_computed_tokens_np[at] += scheduled[r][0]
        return seen


def prefilled(costs, count, rng, **options) -> tuple[Runner, list[str]]:
    """A runner whose `count` requests had their prompts, each with drafts of confidence 1 ready."""
    runner, names = Runner(costs, **options), [f"r{i}" for i in range(count)]
    for name, slot in zip(names, rng.sample(range(SLOTS), count), strict=True):
        runner.add(name, slot, prompt=4)
    first = runner.step({r: (4, 0) for r in names}, np.ones((count, K)))
    assert first.draft
    return runner, names


def test_cheap_rows_verify_all(run_rng):
    runner, names = prefilled(FLAT, 5, run_rng)
    seen = runner.step({r: (1, K) for r in names}, np.full((5, K), 0.1))
    assert seen.budget == 5 * K and seen.draft
    again = runner.step({r: (1, K) for r in names})
    assert again.budget == 5 * K, "rows that cost nothing are verified whatever their confidence"
    assert again.cpu_rows.tolist() == again.start.diff().tolist() == [1 + K] * 5


def test_steep_rows_go_to_the_most_confident(run_rng):
    """The budget is the policy's own of last-known confidences; the split is that of the fresh ones."""
    np_rng = np.random.default_rng(run_rng.getrandbits(32))
    runner, names = prefilled(STEEP, 8, run_rng)
    bound = 0
    for _ in range(20):
        want = None
        while want is None or not want.draft:  # without a draft pass there are no confidences to see
            confidence = np_rng.random((8, K)).astype(np.float32)
            want = plan(STEEP, confidence, np.full(8, K), base_rows=8, sampling=8)
        for _ in range(2):
            runner.step({r: (1, K) for r in names}, confidence)
        seen = runner.step({r: (1, K) for r in names}, np.ones((8, K)))
        assert (seen.budget, seen.draft) == (want.budget, want.draft)
        assert seen.rows == 8 + want.budget == int(seen.cpu_rows.sum()) == int(seen.start[-1])
        assert seen.logits.diff().tolist() == (seen.lengths + 1).tolist() and seen.cpu_logits[-1] == seen.logits[-1]
        chance = np.cumprod(confidence.astype(np.float64), 1)
        kept = [chance[names.index(r), i] for r, n in zip(seen.order, seen.lengths, strict=True) for i in range(n)]
        assert np.allclose(sorted(kept), np.sort(chance, None)[chance.size - want.budget :])
        bound += 0 < want.budget < 8 * K
    assert bound > 5, "the costs here are to bind"


def test_prohibitive_rows_cost_neither_rows_nor_passes(run_rng):
    runner, names = Runner(PROHIBITIVE), ["a", "b"]
    for slot, name in enumerate(names):
        runner.add(name, slot, prompt=4)
    assert not runner.step({r: (4, 0) for r in names}).draft
    for _ in range(2 * HORIZON):
        seen = runner.step({r: (1, K) for r in names})
        assert (seen.rows, seen.budget, seen.draft, seen.ready) == (2, 0, False, 0)
        assert seen.cpu_rows.tolist() == [1, 1] and seen.logits.tolist() == seen.start.tolist() == [0, 1, 2]


def test_placeholders_are_dropped(run_rng):
    """Drafts scheduled for a new request, or after a part of a prompt, were made by nobody."""
    runner, names = prefilled(FLAT, 2, run_rng)
    free = next(s for s in range(SLOTS) if s not in runner.states.req_id_to_index.values())
    runner.add("new", free, prompt=9, computed=4)
    seen = runner.step({"new": (1, K), **{r: (1, K) for r in names}})
    assert dict(zip(seen.order, seen.lengths, strict=True)) == {"new": 0, names[0]: K, names[1]: K}
    assert seen.ready == 2 * K == seen.budget
    seen = runner.step({"new": (4, K), **{r: (1, K) for r in names}})
    assert dict(zip(seen.order, seen.lengths, strict=True))["new"] == 0
    seen = runner.step({"new": (1, K)})
    assert seen.lengths.tolist() == [K], "the prompt is over, a draft pass followed"


def test_budgets_see_no_confidences_of_the_drafts_they_are_for(run_rng):
    """A step's budget changes exactly two steps after the confidences did: with sampled drafts it would
    otherwise depend on the draw."""
    runner, names = prefilled(STEEP, 8, run_rng)
    low, high = np.full((8, K), 0.01), np.ones((8, K))
    for _ in range(3):
        before = runner.step({r: (1, K) for r in names}, high).budget
    budgets = [runner.step({r: (1, K) for r in names}, low).budget for _ in range(4)]
    assert budgets[:2] == [before] * 2 and budgets[2] < before


def test_no_copy_is_waited_for_early(run_rng, monkeypatch):
    """A step needs nothing of the draft pass before it, which the GPU may still run."""
    copies = []

    class Late:
        def __init__(self, tensor, stream):
            self.values = tensor.clone().numpy()
            copies.append(self)

        def wait(self):
            assert copies.index(self) < len(copies) - 1, "the copy of the last step"
            return self.values

    monkeypatch.setattr(verification, "HostCopy", Late)
    runner, names = prefilled(STEEP, 8, run_rng)
    for _ in range(5):
        runner.step({r: (1, K) for r in names}, np.ones((8, K)))
    assert len(copies) == 6


def test_equal_calls_equal_budgets(run_rng):
    """Two ranks: the same steps, requests that come and go in reused slots, random batches."""
    np_rng = np.random.default_rng(run_rng.getrandbits(32))
    ranks = [Runner(STEEP), Runner(STEEP)]
    alive: list[str] = []
    for t in range(60):
        if alive and run_rng.random() < 0.3:
            gone = alive.pop(run_rng.randrange(len(alive)))
            for rank in ranks:
                del rank.states.req_id_to_index[gone]
        if len(alive) < 8 or not alive:
            free = run_rng.choice([s for s in range(SLOTS) if s not in ranks[0].states.req_id_to_index.values()])
            alive.append(f"r{t}")
            for rank in ranks:
                rank.add(alive[-1], free, prompt=run_rng.choice([3]))
        chosen = run_rng.sample(alive, run_rng.randint(1, len(alive)))
        scheduled = {}
        for r in chosen:
            slot = ranks[0].states.req_id_to_index[r]
            decoding = ranks[0].states.num_computed_tokens_np[slot] >= 3
            scheduled[r] = (1, run_rng.randint(0, K)) if decoding else (3, 0)
        confidence = np_rng.random((len(chosen), K))
        one, two = (rank.step(scheduled, confidence) for rank in ranks)
        assert (one.budget, one.draft, one.lengths.tolist()) == (two.budget, two.draft, two.lengths.tolist())
        for r, n in zip(one.order, one.lengths, strict=True):
            assert 0 <= n <= scheduled[r][1]


def test_the_budget_fits_one_chunk_of_logits(run_rng):
    runner, names = prefilled(FLAT, 5, run_rng, max_total_logits=9)
    assert runner.step({r: (1, K) for r in names}).budget == 4
    runner.manager.max_total_logits = 5
    seen = runner.step({r: (1, K) for r in names})
    assert (seen.budget, seen.draft) == (0, False), "no draft could be verified, so none is made"


def test_the_split_is_that_of_calibrated_confidences(run_rng):
    """First drafts are less sure than they say, later ones more."""
    np_rng, temperature = np.random.default_rng(run_rng.getrandbits(32)), (20.0, 0.5, 0.5)
    runner, names = prefilled(STEEP, 8, run_rng, calibration=Calibration(temperature, (0.0,) * K, (0,) * K))
    differed = 0
    for _ in range(200):
        if differed > 5:
            break
        confidence = np_rng.uniform(0.3, 0.9, (8, K)).astype(np.float32)
        for _ in range(2):
            runner.step({r: (1, K) for r in names}, confidence)
        seen = runner.step({r: (1, K) for r in names}, np.ones((8, K)))
        odds = np.log(confidence / (1 - confidence)).astype(np.float64)
        for chance, is_ours in ((1 / (1 + np.exp(-odds / temperature)), True), (confidence.astype(np.float64), False)):
            chance = np.cumprod(chance, 1)
            kept = [chance[names.index(r), i] for r, n in zip(seen.order, seen.lengths, strict=True) for i in range(n)]
            best = np.allclose(sorted(kept), np.sort(chance, None)[chance.size - seen.budget :], rtol=1e-5)
            assert best or not is_ours
            differed += not best
    assert differed > 5


def test_always_draft_and_four_values(run_rng):
    runner = Runner(PROHIBITIVE, always_draft=True, returns=4)
    runner.add("a", 0, prompt=2)
    assert runner.step({"a": (2, 0)}, np.ones((1, K))).draft
    assert runner.step({"a": (1, K)}, np.ones((1, K))).draft


def test_one_bad_block_does_not_end_drafting(run_rng):
    """A lone request whose drafts look useless once is drafted for again a few steps later."""
    costs = StepCosts(Curve(((1, 10.0), (100, 10.0))), Curve(((1, 2.0),)))
    runner, (name,) = prefilled(costs, 1, run_rng)
    for _ in range(3):
        assert runner.step({name: (1, K)}, np.full((1, K), 0.9)).draft
    assert runner.step({name: (1, K)}, np.full((1, K), 0.01)).draft
    drafted = [runner.step({name: (1, K)}, np.full((1, K), 0.9)).draft for _ in range(4)]
    assert drafted == [True, False, True, True]


def test_the_prior_learns_and_hopes(run_rng):
    prior = Prior(2)
    for _ in range(20):
        prior.see(np.tile([0.5, 0.1], (HORIZON, 1)))
    assert np.allclose(prior.value, [0.5, 0.1], atol=1e-6)
    prior.see(np.zeros((0, 2)))
    prior.see(np.array([[np.nan, 0.1]]))
    assert prior.value[0] < 0.5 and np.isclose(prior.value[1], 0.1)
    for _ in range(100_000):
        prior.wait()
    assert np.allclose(prior.value, 1)
