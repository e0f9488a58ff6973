# SPDX-License-Identifier: Apache-2.0
"""Scheduled verification in the engine: whatever is verified, the answer is that without drafts.

Random weights agree with their draft by chance only, so an oracle replaces what the draft pass says:
the tokens that the engine without drafts gave, some of them spoilt, with confidences to match.
"""

import functools
import random
from collections import Counter

import numpy as np
import pytest

from tests.e2e.engine.harness import EXACT, EXACT_BOUND, ask, random_prompt
from tests.e2e.engine.oracle import runner_of

K = 3
SPOILT = 0.3
MOST = 8  # tokens of an answer
OPTIONS = {"max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20}


def costs_of(kind: str):
    from deepseek_v41_plugin.verification import Curve, StepCosts

    verify, draft, trim = {
        "cheap": ([(1, 10.0), (1000, 10.0)], 0.1, 0.0),
        "steep": ([(1, 10.0), (8, 10.0), (256, 80.0)], 0.1, 0.01),
        "prohibitive": ([(1, 1.0), (1000, 1000.0)], 50.0, 0.0),
    }[kind]
    return StepCosts(Curve(tuple(verify)), Curve(((1, draft),)), trim)


@pytest.fixture(scope="module")
def prompts(reference, run_seed):
    rng = random.Random(f"{run_seed} scheduled")
    lengths = [1, 2, 8, 9, 17, 40] + [rng.randrange(1, 30) for _ in range(58)]
    return [random_prompt(rng, reference, length) for length in lengths]


@pytest.fixture(scope="module")
def plain(engines, prompts):
    """prompt -> tokens and their logprobs, without drafts."""
    done = ask(engines(**OPTIONS), prompts, max_tokens=MOST)
    return {tuple(r.prompt_token_ids): r.outputs[0] for r in done}


class Scheduled:
    """An engine with drafts, its speculator and manager, and what they did."""

    def __init__(self, llm, plain, rng):
        from deepseek_v41_plugin.vllm.speculator import Speculator

        self.llm, self.rng = llm, rng
        runner = runner_of(llm)
        self.speculator, self.states = runner.speculator, runner.req_states
        self.manager, self.known = runner.adaptive_verification, {p: [*p, *o.token_ids] for p, o in plain.items()}
        assert isinstance(self.speculator, Speculator) and self.speculator.manager is self.manager
        self.passes, self.splits, self.sure = 0, [], {}

    def watch(self, patch) -> None:
        """Put the oracle in the draft's place and note passes and splits."""
        generate, split = self.speculator._generate_draft, self.manager.split
        run_model = self.speculator._run_model

        def count(*args, **kwargs):
            self.passes += 1
            return run_model(*args, **kwargs)

        def oracle(num_reqs, *args, **kwargs):
            generate(num_reqs, *args, **kwargs)
            if self.speculator.drafted:
                self.say(num_reqs)

        def note(idx_mapping, drafts, budget):
            lengths = split(idx_mapping, drafts, budget)
            sure = [np.array(self.sure.get(slot, [0.0] * K)) for slot in idx_mapping.tolist()]
            self.splits.append((lengths.tolist(), drafts.tolist(), budget, sure))
            return lengths

        patch.setattr(self.speculator, "_run_model", count)
        patch.setattr(self.speculator, "_generate_draft", oracle)
        patch.setattr(self.manager, "split", note)

    def say(self, num_reqs: int) -> None:
        s = self.speculator
        slots = s.sample_idx_mapping[: num_reqs * K : K].tolist()
        positions = s.sample_pos[: num_reqs * K].view(num_reqs, K).tolist()
        for row, (slot, at) in enumerate(zip(slots, positions, strict=True)):
            prompt = tuple(self.states.all_token_ids.gpu[slot, : self.states.prompt_len.np[slot]].tolist())
            sequence = self.known[prompt]
            for i, position in enumerate(at):
                right, spoilt = sequence[position] if position < len(sequence) else 7, self.rng.random() < SPOILT
                s.draft_tokens[row, i] = right ^ 1 if spoilt else right
                sure = self.rng.uniform(0.0, 0.6) if spoilt else self.rng.uniform(0.5, 1.0)
                s.draft_token_confidence_probs[row, i] = sure
            self.sure[slot] = s.draft_token_confidence_probs[row, :K].tolist()

    def counts(self) -> Counter:
        tally = self.speculator.counts.tally
        names = ("drafted", "verified", "accepted", "budget", "saved_rows", "steps")
        return Counter({n: getattr(tally, n) for n in names} | {"skipped": self.speculator.counts.skipped})


@pytest.fixture(scope="module")
def launch(engines, tmp_path_factory, plain, run_seed):
    """mode -> an engine whose costs a test may set.  A CPU host schedules synchronously unless made not to."""
    from vllm.platforms import current_platform

    from deepseek_v41_plugin.verification import Profile
    from deepseek_v41_plugin.vllm import profiles

    platform = type(current_platform)
    finish = platform.check_and_update_config

    def finish_async(config):
        finish(config)
        config.scheduler_config.async_scheduling = True

    @functools.cache
    def launched(mode: str) -> Scheduled:
        path = tmp_path_factory.mktemp("profile") / "costs.json"
        with pytest.MonkeyPatch.context() as patch:
            # The identity is that of the launch itself, which is known only then.
            patch.setattr(profiles, "identity", lambda config: {"of": "this test"})
            Profile({"of": "this test"}, costs_of("cheap")).save(path)
            if mode == "async":
                patch.setattr(platform, "check_and_update_config", staticmethod(finish_async))
            additional = {"dsv41": EXACT["additional_config"]["dsv41"] | {"verify_profile": str(path)}}
            speculative = {"method": "dspark", "num_speculative_tokens": K, "enable_adaptive_verification": True}
            llm = engines(**OPTIONS, additional_config=additional, speculative_config=speculative, async_scheduling=mode == "async")
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == (mode == "async")
        return Scheduled(llm, plain, random.Random(f"{run_seed} oracle"))

    return launched


@pytest.fixture
def mode() -> str:
    """How the host schedules; a test may ask for both."""
    return "sync"


@pytest.fixture
def watched(launch, mode, monkeypatch):
    engine = launch(mode)
    engine.watch(monkeypatch)
    engine.passes, engine.splits = 0, []
    return engine


both_modes = pytest.mark.parametrize("mode", ["sync", "async"])


def check_equal(request, plain) -> None:
    """The same tokens and logprobs as without drafts."""
    mine, theirs = request.outputs[0], plain[tuple(request.prompt_token_ids)]
    count = len(mine.token_ids)
    assert list(mine.token_ids) == list(theirs.token_ids)[:count]
    for token, a, b in zip(mine.token_ids, mine.logprobs, theirs.logprobs, strict=False):
        assert abs(a[token].logprob - b[token].logprob) < EXACT_BOUND


@pytest.mark.parametrize("kind", ["cheap", "steep", "prohibitive"])
def test_a_batch_drains(kind, watched, plain, prompts, monkeypatch):
    """64 requests at once, to the last one."""
    monkeypatch.setattr(watched.manager, "costs", costs_of(kind))
    before = watched.counts()
    lengths = [1 + i * MOST // 64 for i in range(64)]
    sampling = [{"max_tokens": n} for n in lengths]
    done = ask_each(watched.llm, prompts, sampling)
    for request, n in zip(done, lengths, strict=True):
        check_equal(request, plain)
        assert len(request.outputs[0].token_ids) == n
    counts = watched.counts()
    counts.subtract(before)
    assert counts["steps"] > 0 and counts["drafted"] == counts["verified"] + counts["saved_rows"]
    assert counts["accepted"] <= counts["verified"] <= counts["budget"]
    assert watched.passes == counts["steps"] - counts["skipped"]
    if kind == "cheap":
        assert counts["skipped"] == counts["saved_rows"] == 0 and not watched.splits
        assert counts["accepted"] > 0.25 * counts["verified"]  # 0.5 with a deviation of 0.04
    if kind == "steep":
        assert counts["saved_rows"] > 0 < counts["accepted"]
        assert any(len(set(lengths)) > 2 for lengths, *_ in watched.splits), "lengths differ by request"
        for lengths, drafts, budget, sure in watched.splits:
            assert sum(lengths) == budget and all(0 <= n <= d for n, d in zip(lengths, drafts, strict=True))
            # What is verified is what was likely, by the confidences of these drafts themselves.
            kept, every = ([x for n, s in zip(most, sure, strict=True) for x in np.cumprod(s)[:n]] for most in (lengths, drafts))
            assert np.allclose(np.sort(kept), np.sort(every)[len(every) - budget :])
    if kind == "prohibitive":
        assert watched.passes == counts["drafted"] == counts["verified"] == 0 and counts["skipped"] == counts["steps"]


def ask_each(llm, prompts, sampling):
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, logprobs=0, ignore_eos=True, **s) for s in sampling]
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


@both_modes
def test_costs_that_change_in_every_step(watched, plain, prompts, run_rng, monkeypatch):
    """Requests arrive at any time, prompts in chunks among decodes; budgets and passes come and go."""
    from vllm import SamplingParams

    core = watched.llm.llm_engine
    waiting, done = run_rng.sample(prompts, 20), []
    for t in range(400):
        if waiting and (run_rng.random() < 0.6 or not core.has_unfinished_requests()):
            for _ in range(min(len(waiting), run_rng.randint(1, 6))):
                params = SamplingParams(temperature=0, logprobs=0, ignore_eos=True, max_tokens=run_rng.randint(1, MOST))
                core.add_request(f"ragged-{len(waiting)}", {"prompt_token_ids": waiting.pop()}, params)
        monkeypatch.setattr(watched.manager, "costs", costs_of(run_rng.choice(["cheap"] * 2 + ["steep"] * 7 + ["prohibitive"])))
        done += [out for out in core.step() if out.finished]
        if not waiting and not core.has_unfinished_requests():
            break
    assert len(done) == 20, "the batch did not drain"
    for request in done:
        check_equal(request, plain)
    assert watched.passes


@both_modes
@pytest.mark.parametrize("kind", ["cheap", "steep", "prohibitive"])
def test_structured_output(kind, watched, engines, monkeypatch, run_rng):
    """The host checks drafts against grammars, made ones and those of a pass that was left out."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    monkeypatch.setattr(watched.manager, "costs", costs_of(kind))
    monkeypatch.setattr(watched, "say", lambda num_reqs: None)  # the oracle does not know these answers
    params = [
        SamplingParams(temperature=0, max_tokens=10, structured_outputs=StructuredOutputsParams(regex=regex))
        for regex in ("[a-c]{6}", "(0[1-9]|1[0-2])-[0-9]{4}", "(yes|no|maybe), [A-Z]{3}")
    ] + [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)]
    texts = [f"{run_rng.choice(['A', 'The', 'x y'])} {i}" for i in range(len(params))]
    want, got = (
        [out.outputs[0].token_ids for out in llm.generate(texts, params, use_tqdm=False)]
        for llm in (engines(**OPTIONS), watched.llm)
    )
    assert got == want


def test_metrics_are_the_tally(watched):
    """What /metrics shows of this engine is what its worker counted."""
    from prometheus_client import REGISTRY

    config = watched.llm.llm_engine.vllm_config
    labels = {"model_name": config.model_config.served_model_name, "engine": "0"}
    tally = watched.speculator.counts.tally
    shown = {name: [] for name in ("verified", "accepted")}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if not sample.name.startswith("vllm:dsv41_"):
                continue
            name = sample.name.removeprefix("vllm:dsv41_").removesuffix("_total")
            shown[name] = [*shown.get(name, []), sample.value]
            assert sample.labels.items() >= labels.items()
    for name in ("drafted", "verified", "accepted", "budget", "saved_rows", "steps"):
        assert getattr(tally, name) in shown[name], name
    assert np.sum(tally.verified_by_position) == tally.verified and np.sum(tally.accepted_by_position) == tally.accepted
    assert set(tally.verified_by_position) <= set(shown["verified_per_pos"])
