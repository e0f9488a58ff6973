# SPDX-License-Identifier: Apache-2.0
"""The doors into the host, the check of a cost profile at launch, and what profile-verify computes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the doors are the host's")

from deepseek_v41_plugin.cli import profile_verify
from deepseek_v41_plugin.verification import Curve, Profile, StepCosts
from deepseek_v41_plugin.vllm import MODEL, gates, patching, profiles
from deepseek_v41_plugin.vllm.options import OptionError

COSTS = StepCosts(Curve(((1, 10.0), (100, 20.0))), Curve(((1, 1.0),)), 0.1)


def config_of(model=MODEL, method="dspark", adaptive=True, profile=None, **changed):
    dsv41 = {} if profile is None else {"verify_profile": str(profile)}
    values = {"exact": False, "dtype": torch.bfloat16, "tp": 1, "drafts": 3, "cache": "auto", "worker": ""} | changed
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture=model, dtype=values["dtype"], served_model_name="served",
            hf_config=SimpleNamespace(dsv41_raw={"hidden_size": values.get("hidden", 64)}),
        ),
        speculative_config=SimpleNamespace(
            method=method, enable_adaptive_verification=adaptive, num_speculative_tokens=values["drafts"],
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tp"], data_parallel_size=1, worker_extension_cls=values["worker"],
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache"]), instance_id="a-test",
        additional_config={"dsv41": dsv41 | {"exact": values["exact"]}},
    )


def test_a_profile_is_demanded_and_must_fit(tmp_path):
    path = tmp_path / "costs.json"
    with pytest.raises(OptionError, match=r"additional_config\.dsv41\.verify_profile: missing.*dsv41 profile-verify"):
        profiles.check_profile(config_of())
    with pytest.raises(OptionError, match="verify_profile: .*cannot be read.*dsv41 profile-verify"):
        profiles.check_profile(config_of(profile=path))
    Profile(profiles.identity(config_of()), COSTS).save(path)
    profiles.check_profile(config_of(profile=path))
    for name, changed in {
        "tensor_parallel_size": {"tp": 2}, "num_speculative_tokens": {"drafts": 5}, "model": {"hidden": 128},
        "kv_cache_dtype": {"cache": "fp8_ds_mla"}, "dtype": {"dtype": torch.float32},
    }.items():
        with pytest.raises(OptionError, match=rf"verify_profile: .*: {name} was .* and is .* here"):
            profiles.check_profile(config_of(profile=path, **changed))
    with pytest.raises(OptionError, match="dtype was 'bfloat16' and is 'float64' here"):
        profiles.check_profile(config_of(profile=path, exact=True))


def test_no_profile_is_demanded_of_others():
    profiles.check_profile(config_of(adaptive=False))
    profiles.check_profile(config_of(worker=profiles.MEASURING))
    profiles.check_profile(SimpleNamespace(speculative_config=None, additional_config={}))


def test_what_cannot_be_scheduled_is_refused(tmp_path):
    with pytest.raises(OptionError, match="verify_profile: given, but nothing is scheduled"):
        profiles.check_profile(config_of(adaptive=False, profile="p"))
    with pytest.raises(OptionError, match="enable_adaptive_verification: ngram drafts have no confidences"):
        profiles.check_profile(config_of(method="ngram"))


def test_the_worker_extension_has_its_name():
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert hasattr(resolve_obj_by_qualname(profiles.MEASURING), "dsv41_measured")


class Owner:
    """A stand-in for a module of the host."""


def test_doors_open_to_ours_only(monkeypatch):
    called = []
    monkeypatch.setattr(gates, "check_profile", lambda config: called.append("ours"))
    monkeypatch.setattr(gates.metrics, "expose", lambda config: called.append("metrics"))
    monkeypatch.setattr(gates.balance_gates, "refuse", lambda config: None)
    Owner.check = lambda config: called.append("host")
    patching.wrap(Owner, "check", gates._validate)
    wrapped = Owner.check
    patching.wrap(Owner, "check", gates._validate)
    assert Owner.check is wrapped, "once"
    Owner.check(config_of())
    assert called == ["ours", "metrics"]
    for other in (config_of(model="Qwen3ForCausalLM"), SimpleNamespace(model_config=None)):
        called.clear()
        Owner.check(other)
        assert called == ["host"]


def test_other_speculators_and_managers_are_the_hosts():
    states = SimpleNamespace()

    def host(*args, **given):
        return "host"

    for config in (config_of(model="Qwen3ForCausalLM"), config_of(method="mtp")):
        assert gates._init_speculator(host, config, torch.device("cpu"), states) == "host"
    given = {"vllm_config": config_of(), "enable_adaptive_verification": True}
    assert gates._create_manager(host, req_states=states, **given) == "host"


def test_graph_modes():
    from vllm.config.compilation import CUDAGraphMode

    def host(mode, *, piecewise_capture_available):
        return "host"

    assert gates._resolve_mode(host, CUDAGraphMode.FULL, piecewise_capture_available=True) == "host"
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        assert gates._resolve_mode(host, mode, piecewise_capture_available=True) == mode


def test_the_hosts_doors_are_where_they_were():
    """Names and arguments that the runner uses, in its source: importing it would unsettle a CPU host."""
    import ast
    from importlib.util import find_spec

    source = ast.parse(open(find_spec(gates.RUNNER).origin).read())
    calls = {
        node.func.id: {k.arg for k in node.keywords}
        for node in ast.walk(source) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    needed = {"enable_adaptive_verification", "req_states", "query_start_loc", "num_bonus_tokens"}
    needed |= {"max_total_logits", "vllm_config"}
    assert needed <= calls["maybe_create_adaptive_verification_manager"]
    assert "piecewise_capture_available" in calls["resolve_adaptive_cudagraph_mode"] and "init_speculator" in calls


def rank_of(rng: np.random.Generator, accept: float, steps: int = 40, size: int = 16, k: int = 3) -> dict[str, list]:
    """What a rank measures: 1 ms a row, 2 ms a draft pass; drafts accepted as their confidences say, times `accept`."""
    blocks = []
    for _ in range(steps):
        confidence = rng.uniform(0.2, 0.95, (size, k))
        accepted = np.cumprod(rng.random((size, k)) < accept * confidence, 1).sum(1)
        blocks.append((rng.permutation(size).tolist(), confidence.tolist(), [k] * size, accepted.tolist()))
    verify = [(rows, size, float(rows)) for rows in (16, 32, 64) for _ in range(3)]
    return {"verify": verify, "draft": [(size, 2.0)], "trim": [0.1, 0.3, 0.2], "blocks": blocks}


def test_profile_of_measurements(run_rng, tmp_path):
    rank = rank_of(np.random.default_rng(run_rng.getrandbits(32)), 1.0, steps=300)
    costs = profile_verify.costs_of(rank)
    assert costs.verify.at(48) == 48 and costs.draft_ms(16) == 2 and costs.trim_ms == 0.2
    calibration, remark = profile_verify.calibrate(*profile_verify.blocks_of(rank["blocks"]))
    assert np.allclose(calibration.temperature, 1, atol=0.5) and "cross entropy" in remark  # 8 standard deviations
    profile_verify.save_log(tmp_path / "log.npz", rank["blocks"], 3)
    log = np.load(tmp_path / "log.npz")
    assert log["logits"].shape == (300, 16, 3) and log["accepted"].shape == (300, 16)
    slots, confidence, _, accepted = rank["blocks"][7]
    assert np.allclose(1 / (1 + np.exp(-log["logits"][7, slots[2]])), confidence[2])
    assert log["accepted"][7, slots[2]] == accepted[2]
    assert "64" in profile_verify.summary(costs, [rank], 3, remark)


def test_too_little_to_calibrate(run_rng):
    rng = np.random.default_rng(run_rng.getrandbits(32))
    for rank, reason in ((rank_of(rng, 0.0), "Random weights"), (rank_of(rng, 1.0, steps=2), "fewer than 200")):
        calibration, remark = profile_verify.calibrate(*profile_verify.blocks_of(rank["blocks"]))
        assert calibration is None and reason in remark


def test_batch_sizes():
    assert profile_verify.batch_sizes(24, False) == [1, 2, 4, 8, 16, 24]
    assert profile_verify.batch_sizes(1, False) == profile_verify.batch_sizes(1, True) == [1]
    assert profile_verify.batch_sizes(64, True) == [1, 8, 64]


def test_the_block_is_the_models(tmp_path):
    assert profile_verify.block_of(tmp_path) == 5
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"dspark_block_size": 3}}))
    assert profile_verify.block_of(tmp_path) == 3
