# SPDX-License-Identifier: Apache-2.0
"""Counts from the worker's file to prometheus."""

import atexit
import gc
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

prometheus_client = pytest.importorskip("prometheus_client")

from deepseek_v41_plugin.vllm import metrics
from deepseek_v41_plugin.vllm.metrics import TOTALS, Collector, StepCounts

K, CPU = 3, torch.device("cpu")


@pytest.fixture(autouse=True)
def run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def config_of(instance: str, engine: int = 0):
    return SimpleNamespace(
        instance_id=instance, parallel_config=SimpleNamespace(data_parallel_index=engine),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
    )


def samples(collector: Collector) -> dict[tuple, float]:
    found = [sample for family in collector.collect() for sample in family.samples]
    return {(s.name, *(value for _, value in sorted(s.labels.items()))): s.value for s in found}


def some_steps(counts: StepCounts, rng, scheduled: bool) -> dict[str, int]:
    """Random steps; what they amount to."""
    want = dict.fromkeys([name for name, _ in TOTALS], 0)
    for _ in range(20):
        requests = rng.randint(1, 5)
        verified = [rng.randint(0, K) for _ in range(requests)]
        accepted = [rng.randint(0, n) for n in verified]
        prefill = [n == 0 and rng.random() < 0.5 for n in verified]  # samples nothing, rejects nothing
        sampled = [0 if p else a + 1 for a, p in zip(accepted, prefill, strict=True)]
        rejected = [v - a for v, a in zip(verified, accepted, strict=True)]
        drafted = sum(verified) + rng.randint(0, 4) if scheduled else sum(verified)
        draft = not scheduled or rng.random() < 0.7
        counts.add(
            torch.tensor(sampled), torch.tensor(rejected), sum(verified), drafted if scheduled else None, draft,
        )
        for name, n in {
            "drafted": drafted, "verified": sum(verified), "accepted": sum(accepted), "budget": sum(verified),
            "saved_rows": drafted - sum(verified), "steps": 1, "skipped_draft_passes": not draft,
        }.items():
            want[name] += n
    return want


@pytest.mark.parametrize("scheduled", [False, True])
def test_counts_reach_the_collector(scheduled, run_rng):
    collector = Collector()
    collector.engines["here"] = "a model"
    assert samples(collector) == {}, "no worker has begun"
    workers = [StepCounts.of(config_of(f"here_dp{i}", i), CPU, 0) for i in range(2)]
    wants = [some_steps(worker, run_rng, scheduled) for worker in workers]
    found = samples(collector)
    for i, (worker, want) in enumerate(zip(workers, wants, strict=True)):
        assert {n: found[f"vllm:dsv41_{n}_total", str(i), "a model"] for n in want} == want
        for position in range(K):
            for kind in ("verified", "accepted"):
                by_position = getattr(worker.tally, f"{kind}_by_position")[position]
                assert found[f"vllm:dsv41_{kind}_per_pos_total", str(i), "a model", str(position)] == by_position
        assert worker.tally.verified_by_position.sum() == want["verified"]
    if not scheduled:
        assert wants[0]["drafted"] == wants[0]["verified"] and not wants[0]["saved_rows"]


def test_files_go_with_their_owners(run_directory):
    one, two = StepCounts.of(config_of("here"), CPU, 0), StepCounts.of(config_of("other"), CPU, 0)
    assert len(list(metrics.folder().iterdir())) == 2
    del one
    gc.collect()
    assert [path.name for path in metrics.folder().iterdir()] == [f"other.0.{os.getpid()}"]
    collector = Collector()
    collector.engines["other"] = "m"
    collector.clean()
    assert not list(metrics.folder().iterdir())
    two.add(torch.tensor([1]), torch.tensor([0]), 0, None, True)
    assert two.tally.steps == 1 and samples(collector) == {}


def test_files_of_the_killed_are_swept(run_directory):
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, 1, os.getpid()):
        (metrics.folder() / f"old.0.{pid}").write_bytes(b"")
    StepCounts.of(config_of("here"), CPU, 0)
    left = {path.name for path in metrics.folder().iterdir()}
    assert f"old.0.{gone.pid}" not in left and {"old.0.1", f"old.0.{os.getpid()}"} <= left


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    """As it is in one of several API servers of this process's parent; the series that it shows."""
    from prometheus_client import multiprocess

    monkeypatch.setattr(multiprocess.MultiProcessCollector, "collect", multiprocess.MultiProcessCollector.collect)
    monkeypatch.setattr(metrics, "_collector", None)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(prometheus_client.REGISTRY, "register", lambda collector: None)

    def shown():
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return {
            (sample.name, sample.labels["engine"], sample.labels["model_name"]): sample.value
            for family in registry.collect() for sample in family.samples if "engine" in sample.labels
        }

    yield shown
    atexit.unregister(metrics._collector.clean)


@pytest.mark.parametrize("parent", [True, False])
def test_several_api_servers(endpoint, monkeypatch, parent):
    """Each shows the engine that its parent launched, however it calls its own, and leaves the files to the parent;
    a name left over from somebody else is not believed."""
    monkeypatch.setenv(metrics.LAUNCHED, f"{os.getppid() if parent else 1}:launched")
    workers = [StepCounts.of(config_of(name), CPU, 0) for name in ("launched", "own")]
    workers[not parent].add(torch.tensor([2]), torch.tensor([1]), 2, None, True)
    workers[not parent].add(torch.tensor([2]), torch.tensor([1]), 2, None, True)
    launch = config_of("own")
    launch.model_config = SimpleNamespace(served_model_name=["m", "alias"])
    metrics.expose(launch)
    assert endpoint()["vllm:dsv41_verified_total", "0", "m"] == 4
    assert os.environ[metrics.LAUNCHED] == (f"{os.getppid()}:launched" if parent else f"{os.getpid()}:own")


def test_only_the_first_rank_writes(run_directory):
    StepCounts.of(config_of("here"), CPU, 1).add(torch.tensor([2]), torch.tensor([1]), 2, None, True)
    assert not list(run_directory.iterdir())


def test_a_foreign_directory_is_not_used(run_directory, monkeypatch):
    said = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *args: said.append(text % args))
    metrics.folder().chmod(0o777)
    counts = StepCounts.of(config_of("here"), CPU, 0)
    counts.add(torch.tensor([2]), torch.tensor([1]), 2, None, True)
    assert counts.tally.verified == 2 and len(said) == 1 and "not a directory of this user alone" in said[0]
    collector = Collector()
    collector.engines["here"] = "m"
    assert samples(collector) == {}


def test_a_torn_or_foreign_file_is_skipped(run_directory):
    collector = Collector()
    collector.engines["here"] = "m"
    np.arange(3).tofile(metrics.folder() / "here.0")
    assert samples(collector) == {}


def test_counts_wait_for_their_copies(monkeypatch):
    """Nothing blocks on a copy that is under way; steps are counted in order once it is there."""
    copies = []

    class Late:
        def __init__(self, tensor, stream):
            self.values, self.there = tensor.numpy(), False
            copies.append(self)

        def arrived(self):
            return self.there

        def wait(self):
            assert self.there
            return self.values

    monkeypatch.setattr(metrics, "HostCopy", Late)
    counts = StepCounts(K, CPU, None)
    for _ in range(3):
        counts.add(torch.tensor([3]), torch.tensor([0]), 2, None, True)
    assert counts.tally.steps == 0
    copies[1].there = True
    counts.add(torch.tensor([3]), torch.tensor([0]), 2, None, True)
    assert counts.tally.steps == 0, "in order"
    copies[0].there = True
    counts.add(torch.tensor([3]), torch.tensor([0]), 2, None, True)
    assert (counts.tally.steps, counts.tally.accepted) == (2, 4)
