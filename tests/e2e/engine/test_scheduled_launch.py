# SPDX-License-Identifier: Apache-2.0
"""Costs from the tool to the launch that uses them, and two ranks that must choose the same budgets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.engine import batch_job
from tests.e2e.engine.harness import EXACT, ask, check_request, check_tokens, random_prompt

K = 3
SPECULATIVE = {"method": "dspark", "num_speculative_tokens": K, "enable_adaptive_verification": True}


def run_python(*arguments: str, given: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], input=given, text=True, capture_output=True, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def with_profile(path: Path) -> dict:
    return {"dsv41": EXACT["additional_config"]["dsv41"] | {"verify_profile": str(path)}}


def test_a_launch_without_costs_says_so(engines):
    with pytest.raises(ValueError, match=r"verify_profile: missing.*dsv41 profile-verify"):
        engines(speculative_config=SPECULATIVE)


def test_the_tools_costs_are_taken_at_launch(engines, checkpoint, reference, run_rng, tmp_path):
    """`dsv41 profile-verify` in a process of its own; its file fits the launch it was made for."""
    path, log = tmp_path / "costs.json", tmp_path / "log.npz"
    tool = (
        "import argparse, sys; from deepseek_v41_plugin.cli import profile_verify as p; a = argparse.ArgumentParser();"
        "p.add_parser(a.add_subparsers()); x = a.parse_args(); sys.exit(x.run(x))"
    )
    said = run_python(
        "-c", tool, "profile-verify", str(checkpoint), "-o", str(path), "--log", str(log), "--quick",
        "--max-num-seqs", "2", "--context", "8", "--engine-args", json.dumps(EXACT),
    )
    assert "calibration" in said and "trimming a batch" in said
    profile = json.loads(path.read_text())
    assert profile["identity"]["num_speculative_tokens"] == K and profile["identity"]["dtype"] == "float64"
    sizes = [size for size, _ in profile["verify"]["points"]]
    assert sizes[0] == 1 and sizes[-1] == 2 * (1 + K), "from no drafts of one request to all of two"
    assert log.exists()
    llm = engines(speculative_config=SPECULATIVE, additional_config=with_profile(path))
    for request in ask(llm, [random_prompt(run_rng, reference, n) for n in (3, 20)], max_tokens=6):
        check_request(reference, request)


def test_two_ranks_choose_the_same_budgets(engines, checkpoint, reference, run_rng, tmp_path):
    """Ranks that cut a batch differently would hang, or answer wrongly."""
    from deepseek_v41_plugin.verification import Curve, Profile, StepCosts
    from deepseek_v41_plugin.vllm import profiles

    config = engines(speculative_config={**SPECULATIVE, "enable_adaptive_verification": False}).llm_engine.vllm_config
    costs = StepCosts(Curve(((1, 10.0), (6, 10.0), (64, 24.0))), Curve(((1, 0.01),)))
    Profile(profiles.identity(config) | {"tensor_parallel_size": 2}, costs).save(tmp_path / "costs.json")
    prompts = [random_prompt(run_rng, reference, n) for n in (1, 26, 9, 4, 13, 7)]
    cpus = sorted(os.sched_getaffinity(0))
    work = {
        "engine": EXACT | {
            "model": str(checkpoint), "tensor_parallel_size": 2, "speculative_config": SPECULATIVE,
            "additional_config": with_profile(tmp_path / "costs.json"),
        },
        "prompts": prompts,
        "sampling": {"temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True},
    }
    run_python(
        str(Path(batch_job.__file__)), str(tmp_path / "answer.json"), given=json.dumps(work),
        VLLM_CPU_OMP_THREADS_BIND=f"{cpus[0]}|{cpus[-1]}", VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    answer = json.loads((tmp_path / "answer.json").read_text())
    for prompt, output in zip(prompts, answer["outputs"], strict=True):
        check_tokens(reference, prompt, output["tokens"], output["logprobs"])
