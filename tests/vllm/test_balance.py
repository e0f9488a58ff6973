# SPDX-License-Identifier: Apache-2.0
"""Balancing without an engine: a layer that changes, loads of real rows, doors, what users see."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepseek_v41_plugin.eplb import maps
from deepseek_v41_plugin.kernels import moe
from deepseek_v41_plugin.vllm import balance, balance_gates, balance_log, balance_peers
from deepseek_v41_plugin.vllm.balance_log import BalanceLog
from deepseek_v41_plugin.vllm.options import OptionError, Options, draft_eplb_config
from tests.eplb.test_maps import random_map

LAYERS, EXPERTS, REDUNDANT, RANKS, TOP_K, WIDTH = 3, 6, 2, 2, 2, 16


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.getrandbits(64))


def test_maps_switch(rng):
    own = balance.Maps(LAYERS, EXPERTS, REDUNDANT, torch.device("cpu"))
    kept = own.slots.data_ptr(), own.counts.data_ptr(), own.physical_to_logical.data_ptr()
    want = np.tile(maps.initial(EXPERTS, REDUNDANT), (LAYERS, 1))
    for _ in range(10):
        layer, row = int(rng.integers(LAYERS)), random_map(rng, 1, EXPERTS, REDUNDANT)[0]
        own.switch(layer, row)
        want[layer] = row
        slots, counts = maps.logical_maps(want, EXPERTS, REDUNDANT + 1)
        assert np.array_equal(own.physical_to_logical.numpy(), want)
        assert np.array_equal(own.slots.numpy(), slots) and np.array_equal(own.counts.numpy(), counts)
    assert kept == (own.slots.data_ptr(), own.counts.data_ptr(), own.physical_to_logical.data_ptr()), "graphs hold these"


class Layer:
    """As much of a MoE layer as is balanced: a router, and experts whose bytes tell which one they are."""

    def __init__(self, rng):
        self.gate = SimpleNamespace(
            weight=torch.from_numpy(rng.standard_normal((EXPERTS, WIDTH))).float(), bias=torch.zeros(EXPERTS),
        )
        one = torch.arange(EXPERTS + REDUNDANT, dtype=torch.uint8)[:, None].repeat(1, 4)
        self.experts = SimpleNamespace(w13=one.clone(), w13_scale=one.clone(), w2=one.clone(), w2_scale=one.clone())
        self.replicas = None

    def rows(self, x: torch.Tensor) -> np.ndarray:
        """Rows of each logical expert, chosen without replicas; `replicas` counts the same ones."""
        moe.route(x, self.gate.weight, self.gate.bias, TOP_K, 1.0, 1.0, self.replicas)
        ids, _ = moe.route(x, self.gate.weight, self.gate.bias, TOP_K, 1.0)
        return np.bincount(ids.flatten().numpy(), minlength=EXPERTS)


class StoppedRebalancer:
    """Takes the loads of a wish."""

    def __init__(self, name, weights, held, rank, ranks, board, peers, policy, switch, **options):
        self.weights, self.switch, self.begun, self.stepped, self.options = weights, switch, [], 0, options

    def step(self):
        self.stepped += 1

    def begin(self, load):
        self.begun.append(load())


@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_loads_are_those_of_real_steps(rng, monkeypatch, tensor_rank):
    """Maps change and dummy steps come between; each rebalance sees the rows of its window alone, from one of the
    ranks that hold them."""
    monkeypatch.setattr(balance, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(balance, "Rebalancer", StoppedRebalancer)
    monkeypatch.setattr(balance, "open_board", lambda *a: None)
    monkeypatch.setattr(balance, "open_peers", lambda *a: object())
    monkeypatch.setattr(BalanceLog, "of", classmethod(lambda cls, *a: BalanceLog("target", RANKS, 1, None, None)))
    interval, window = 8, 5
    config = SimpleNamespace(window_size=window, step_interval=interval, use_async=True)
    ranks = SimpleNamespace(redundant=REDUNDANT, rank=0, size=RANKS)
    layers = [Layer(rng) for _ in range(LAYERS)]
    launch = SimpleNamespace(additional_config=None, parallel_config=SimpleNamespace(data_parallel_rank=1))
    model = balance.ModelBalance("target", layers, config, ranks, launch)
    assert [len(w) for w in model.rebalancer.weights] == [4] * LAYERS and model.rebalancer.options["wait"] is False
    steps, first = [], interval // 4
    for step in range(first + 3 * interval):
        x = torch.from_numpy(rng.standard_normal((int(rng.integers(1, 9)), WIDTH))).float()
        rows, dummy = np.stack([layer.rows(x) for layer in layers]), rng.random() < 0.3
        steps.append(rows * (not dummy))
        model.step(dummy)
        if rng.random() < 0.5:
            model.maps.switch(int(rng.integers(LAYERS)), random_map(rng, 1, EXPERTS, REDUNDANT)[0])
    begun = model.rebalancer.begun
    assert len(begun) == 4 and model.rebalancer.stepped == len(steps)
    for n, load in enumerate(begun[1:], 1):
        end = first + n * interval
        assert np.array_equal(load, sum(steps[end - window : end]) * (tensor_rank == 0))


def test_without_buffers_nothing_is_counted(rng, monkeypatch):
    monkeypatch.setattr(balance, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(balance, "open_board", lambda *a: None)
    monkeypatch.setattr(balance, "open_peers", lambda *a: None)
    monkeypatch.setattr(BalanceLog, "of", classmethod(lambda cls, *a: BalanceLog("target", RANKS, 1, None, None)))
    config = SimpleNamespace(window_size=9, step_interval=3, use_async=True)
    launch = SimpleNamespace(additional_config=None, parallel_config=SimpleNamespace(data_parallel_rank=0))
    layers = [Layer(rng)]
    model = balance.ModelBalance("target", layers, config, SimpleNamespace(redundant=REDUNDANT, rank=0, size=RANKS), launch)
    for _ in range(7):
        layers[0].rows(torch.randn(4, WIDTH))
        model.step(False)
    assert not model.loads.counts.any()


def test_policies_are_the_options(rng):
    load, old = rng.integers(1, 100, (LAYERS, EXPERTS)).astype(float), random_map(rng, LAYERS, EXPERTS, REDUNDANT)
    for name in ("place", "fewest_moves"):
        options = Options.parse({"dsv41": {"eplb_policy": name}})
        assert options.eplb_policy == name
        assert maps.problem(balance.policy_of(options, RANKS)(load, old), EXPERTS, RANKS) is None
    easy = Options.parse({"dsv41": {"eplb_slack": 0.999}})
    assert np.array_equal(balance.policy_of(easy, RANKS)(load, old), old)
    assert Options.parse({"dsv41": {"eplb_slack": 0}}).eplb_slack == 0
    for name, value in (("eplb_slack", 1.0), ("eplb_slack", True), ("eplb_policy", "best"), ("eplb_timeout", 0)):
        with pytest.raises(OptionError, match=f"dsv41.{name}: {value!r} is not a"):
            Options.parse({"dsv41": {name: value}})


def test_draft_options():
    from vllm.config.parallel import EPLBConfig

    parallel = SimpleNamespace(eplb_config=EPLBConfig(window_size=7, step_interval=9, num_redundant_experts=16))

    def own(**given):
        config = draft_eplb_config(parallel, Options.parse({"dsv41": {"draft_eplb_config": given}}))
        return config.window_size, config.step_interval, config.num_redundant_experts

    assert own() == (7, 9, 0)
    assert own(num_redundant_experts=4, window_size=3) == (3, 9, 4)
    assert (EPLBConfig().window_size, EPLBConfig().step_interval) == (1000, 3000)
    for name, value in (("step_interval", 0), ("num_redundant_experts", -1), ("window_size", True)):
        with pytest.raises(OptionError, match=f"draft_eplb_config.{name}: {value!r} is not an integer of at least"):
            own(**{name: value})


def test_other_models_on_a_cpu_are_refused():
    """The host's own router ignores the maps there."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True))
    with pytest.raises(ValueError, match="enable_eplb: on a CPU only DeepSeek-V4.1"):
        balance_gates.refuse(config)
    config.parallel_config.enable_eplb = False
    balance_gates.refuse(config)


def test_doors_pass_other_models_on():
    called = []
    controller = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True), suppressed=False)
    assert balance_gates._register_model(lambda *a: called.append("model") or True, controller, torch.nn.Linear(1, 1), None)
    assert balance_gates._register_speculator(lambda *a: called.append("draft") or True, controller, object(), None, False)
    balance_gates._step(lambda *a: called.append("step"), controller, False, False)
    assert called == ["model", "draft", "step"] and not hasattr(controller, "dsv41")


def test_suppressed_and_profiling_steps_do_not_count():
    stepped = []
    controller = SimpleNamespace(suppressed=False, dsv41=[SimpleNamespace(step=stepped.append)])

    def host(*a):
        pytest.fail("the host's state was stepped")

    balance_gates._step(host, controller, is_dummy=True, is_profile=True)
    balance_gates._step(host, controller, is_dummy=True)
    balance_gates._step(host, controller)
    controller.suppressed = True
    balance_gates._step(host, controller)
    assert stepped == [True, False]


def test_no_buffers_is_said_and_survived(monkeypatch):
    said = []
    monkeypatch.setattr(balance_peers.logger, "error", lambda text, *a: said.append(text % a))

    def broken(*a):
        raise balance_peers.TransportError("rank 1, tensor 2: unequal")

    monkeypatch.setattr(balance_peers, "same_weights", broken)
    assert balance_peers.open_peers("auto", SimpleNamespace(name="draft"), [], 1) is None
    assert said == ["EPLB draft: experts stay where they are, no buffers for moving them: rank 1, tensor 2: unequal"]


def samples(path) -> dict:
    return {
        (sample.name, sample.labels["part"], sample.labels.get("position")): sample.value
        for family in balance_log.families([("m", path)]) for sample in family.samples
    }


def test_what_users_see(rng, tmp_path):
    path = tmp_path / "eplb-draft.instance.3.99"
    log = BalanceLog("draft", RANKS, 1000, path, tmp_path / "loads.npz")
    old = random_map(rng, LAYERS, EXPERTS, REDUNDANT)
    load = rng.integers(1, 100, (LAYERS, EXPERTS)).astype(float)
    log.event("begin", generation=1)
    new = log.watched(balance.policy_of(Options(eplb_policy="place"), RANKS))(load, old)
    log.event("plan", generation=1, layers=[0, 1])
    log.event("layer", generation=1, layer=0, step=9, experts=0)
    log.event("layer", generation=1, layer=1, step=9, experts=0)
    log.event("watchdog", generation=1, text="layer 2: rank 1 is not ready within 30 s")
    log.event("abandoned", generation=1, reason="layer 2: rank 1 is not ready within 30 s", superseded=False)
    got = samples(path)

    def value(name, position=None):
        return got["vllm:dsv41_eplb_" + name, "draft", position]

    def of(map_):
        """Balancedness by its definition."""
        replicas = np.array([np.bincount(row, minlength=EXPERTS) for row in map_])
        share = np.take_along_axis(load / replicas, map_, 1).reshape(LAYERS, RANKS, -1).sum(2)
        return (share.mean(1) / share.max(1)).mean()

    crossing = sum(
        len(set(new[layer].reshape(RANKS, -1)[rank]) - set(old[layer].reshape(RANKS, -1)[rank])) for layer in (0, 1) for rank in range(RANKS)
    )
    hottest = [(new[layer] == load[layer].argmax()).sum() for layer in range(LAYERS)]
    assert value("balancedness") == pytest.approx(of(old)) and value("balancedness_planned") == pytest.approx(of(new))
    assert value("moved_experts_total") == crossing and value("moved_bytes_total") == 1000 * crossing
    assert value("rebalances_total") == value("rebalances_failed_total") == value("watchdog_events_total") == 1
    assert value("rebalances_finished_total") == value("rebalances_superseded_total") == 0 < value("rebalance_seconds_total")
    assert value("hottest_replicas", "0") == pytest.approx(np.mean(hottest))
    with np.load(tmp_path / "loads.npz") as file:
        assert np.array_equal(file["loads"], load[None])


def test_a_recording_that_fails_stops_nothing(rng, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(balance_log.logger, "error", lambda text, *a: said.append(text % a))
    log = BalanceLog("target", RANKS, 1000, None, tmp_path / "gone" / "loads.npz")
    load, old = rng.integers(1, 9, (LAYERS, EXPERTS)).astype(float), random_map(rng, LAYERS, EXPERTS, REDUNDANT)
    policy = log.watched(lambda load, old: old)
    assert np.array_equal(policy(load, old), old) and np.array_equal(policy(load, old), old)
    assert len(said) == 1 and "loads are not recorded" in said[0]


def test_a_file_in_the_making_is_passed_over(tmp_path):
    path = tmp_path / "eplb-target.instance.0.1"
    path.write_text(json.dumps({"name": "target"})[:-3])
    assert samples(path) == {} == samples(tmp_path / "eplb-target.gone.0.1")
