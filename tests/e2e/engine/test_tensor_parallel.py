# SPDX-License-Identifier: Apache-2.0
"""Two ranks on this CPU, in the engine's own processes: their answers, and the Engram tables they share."""

import ctypes
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepseek_v41_plugin import checkpoint as shards
from deepseek_v41_plugin.cli.tiny import write_tiny
from tests.e2e.engine import batch_job
from tests.e2e.engine.harness import EXACT, check_tokens, random_prompt
from tests.reference import ReferenceModel


@pytest.fixture(scope="module")
def large_tables(run_seed, tmp_path_factory) -> Path:
    """A tiny checkpoint with two Engram tables of 38 MB, each alone in its shard as in the release."""
    folder = tmp_path_factory.mktemp("tp") / "tiny"
    return write_tiny(folder, preset="tiny", seed=run_seed, overrides={"engram_vocab_size": 200_000})


@pytest.fixture(scope="module")
def reference(large_tables):
    return ReferenceModel(large_tables)


@pytest.fixture(scope="module")
def tables(large_tables) -> list[Path]:
    index = shards.read_index(large_tables)
    return [index[f"layers.{layer}.engram.embed.weight"].path for layer in (1, 4)]


def evict(path: Path) -> None:
    """Drop the file's pages from the kernel's cache, so that what is there later was read since."""
    with open(path, "rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path: Path) -> float:
    """Share of the file's pages in the kernel's cache."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.size // os.sysconf("SC_PAGESIZE")), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(
        ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size), ctypes.c_void_p(pages.ctypes.data),
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return float((pages & 1).mean())


def run_job(checkpoint: Path, prompts: list[list[int]], folder: Path, **options) -> dict:
    """The answer of batch_job: an engine of two ranks, about 30 s."""
    cpus = sorted(os.sched_getaffinity(0))
    work = {
        "engine": EXACT | {
            "model": str(checkpoint), "tensor_parallel_size": 2, "max_num_batched_tokens": 33, "max_num_seqs": 4,
        } | options,
        "prompts": prompts,
        "sampling": {"temperature": 0, "max_tokens": 4, "logprobs": 0, "ignore_eos": True},
    }
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    answer = folder / "answer.json"
    done = subprocess.run(
        [sys.executable, str(Path(batch_job.__file__)), str(answer)],
        input=json.dumps(work), env=environment, text=True, capture_output=True, timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def job(large_tables, tables, reference, run_seed, tmp_path_factory):
    """(prompts, answer of batch_job): one run for all tests here but the last."""
    rng = random.Random(run_seed)
    prompts = [random_prompt(rng, reference, length) for length in (1, 26, 9)]
    for path in tables:
        evict(path)
    before = [cached(path) for path in tables]
    answer = run_job(large_tables, prompts, tmp_path_factory.mktemp("job"))
    read = [(was, cached(path)) for was, path in zip(before, tables, strict=True)]
    return prompts, answer | {"read": read}


def test_two_ranks_answer_as_the_reference(job, reference):
    """Heads, output groups and experts are split; float64 sums cross gloo."""
    prompts, answer = job
    for prompt, output in zip(prompts, answer["outputs"], strict=True):
        check_tokens(reference, prompt, output["tokens"], output["logprobs"])


def test_engram_tables_are_shared(job, tables):
    """Both ranks map the same pages of the same files and have no copy of them."""
    _, answer = job
    for path in tables:
        areas = [area for area in answer["maps"] if area["path"] == str(path)]
        assert len({area["pid"] for area in areas}) == 2, areas
        assert all(area["perms"] == "r--s" and area["private_dirty"] == 0 for area in areas), areas
        assert sum(area["size"] > 36e6 for area in areas) == 2, areas


def test_engram_tables_are_not_read_whole(job):
    """48 tokens look up 288 rows of a table of 9640 pages; the file system may read a few at a time."""
    _, answer = job
    for before, after in answer["read"]:
        if before:
            pytest.skip("the file system of the temporary folder keeps its pages")
        assert 0 < after < 0.2


def test_drafts_and_experts_of_two_ranks(large_tables, reference, run_rng, tmp_path):
    """Both ranks draft alike and verify alike: the split draft model, and rows that were rejected.  Experts of both
    models have replicas, and change places every few steps, which wait for it."""
    prompts = [random_prompt(run_rng, reference, length) for length in (1, 26, 9)]
    balance = {"num_redundant_experts": 2, "step_interval": 3, "window_size": 3, "use_async": False}
    answer = run_job(
        large_tables, prompts, tmp_path, speculative_config={"method": "dspark", "num_speculative_tokens": 3},
        enable_expert_parallel=True, enable_eplb=True, eplb_config=balance,
        additional_config={"dsv41": {"exact": True, "draft_eplb_config": {"num_redundant_experts": 2}, "eplb_record": str(tmp_path / "loads.npz"), "eplb_timeout": 300}},
    )
    for prompt, output in zip(prompts, answer["outputs"], strict=True):
        check_tokens(reference, prompt, output["tokens"], output["logprobs"])
    # At least the first step of three after each prompt verified three drafts.
    assert answer["drafts"] >= 3 * len(prompts)
    for name in ("loads", "loads-draft"):
        with np.load(tmp_path / f"{name}.npz") as file:
            assert len(file["loads"]) >= 1, "no rebalance"
