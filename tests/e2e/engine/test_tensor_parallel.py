# SPDX-License-Identifier: Apache-2.0
"""Two ranks on this CPU, through the engine's own processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.engine import batch_job
from tests.e2e.engine.harness import EXACT, check_tokens, random_prompt


def test_two_ranks(checkpoint, reference, run_rng, tmp_path):
    """Takes about 30 s: heads, output groups and experts are split, the float64 sum crosses gloo."""
    cpus = sorted(os.sched_getaffinity(0))
    prompts = [random_prompt(run_rng, reference, length) for length in (1, 26, 61)]
    job = {
        "engine": EXACT | {
            "model": str(checkpoint), "tensor_parallel_size": 2, "max_num_batched_tokens": 33, "max_num_seqs": 4,
        },
        "prompts": prompts,
        "sampling": {"temperature": 0, "max_tokens": 4, "logprobs": 0, "ignore_eos": True},
    }
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, str(Path(batch_job.__file__)), str(tmp_path / "answers.json")],
        input=json.dumps(job), env=environment, text=True, capture_output=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    for prompt, answer in zip(prompts, answers, strict=True):
        check_tokens(reference, prompt, answer["tokens"], answer["logprobs"])
