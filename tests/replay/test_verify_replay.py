# SPDX-License-Identifier: Apache-2.0
"""``dsv41 verify-replay``: level 1 on a checkpoint's config, level 2 with engines that are made up."""

import json
import stat
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepseek_v41_plugin.cli import main, replay_engines, replay_step
from deepseek_v41_plugin.cli.tiny_presets import make_config
from deepseek_v41_plugin.config import ModelConfig
from deepseek_v41_plugin.model import bounded
from deepseek_v41_plugin.replay import MODES, Policy, metadata, plan, random_batches

IDS = {"bos": 0, "eos": 1, "pad": 2, "image": 3, "noise": 4}


@pytest.fixture
def model(tmp_path):
    """A folder with the config.json of a small model: window 8, 3 drafts, cut at layer 5 of 8."""
    (tmp_path / "config.json").write_text(json.dumps(make_config("tiny", None, False, IDS, 400)))
    return tmp_path


def call(model, *more, keep=12):
    return main.main(["verify-replay", str(model), "--keep-tokens", str(keep), *more])


def test_level_1_counts_and_agrees(model, run_seed, capsys):
    assert call(model, "--batches", "40", "--seed", str(run_seed)) == 0
    out = capsys.readouterr().out
    assert f"40 batches, seed {run_seed}, window 8, keep_tokens 12, drafts 3" in out and out.endswith("equal\n")
    table = {(line[:18].strip(), line.split()[-5]): list(map(int, line.split()[-4:])) for line in out.splitlines()[2:-1]}
    assert {name for name, _ in table} == {"0..4", "5 (cut)", "6..7 and draft"}
    rows = table["0..4", "mask"][0]
    assert all(table["0..4", mode] == table["5 (cut)", "mask"] for mode in ("mask", "compact"))
    assert table["5 (cut)", "compact"][2:] == table["0..4", "mask"][2:], "the cut layer writes for every row"
    assert table["6..7 and draft", "mask"][0] == table["6..7 and draft", "mask"][2] == rows
    kept, keys, window, compressed = table["6..7 and draft", "compact"]
    assert 0 < kept == window < rows and compressed == 0 and keys == table["6..7 and draft", "mask"][1]


def test_level_1_says_what_differs(model, monkeypatch, capsys):
    def wrong(policy, **arrays):
        got = plan(policy, **arrays)
        return replace(got, dropped=np.maximum(got.dropped - 1, 0))

    monkeypatch.setattr(metadata, "plan", wrong)
    assert call(model) == 1
    assert "DIFFERENT in batch " in (out := capsys.readouterr().out) and "request " in out and "equal\n" not in out


@pytest.mark.parametrize("window", [8, 128])
def test_the_models_step_is_the_plan(run_rng, window):
    rng = np.random.default_rng(run_rng.randrange(1 << 30))
    policy = Policy(window, "off", window + 12, 5)
    for batch in random_batches(rng, policy, 50):
        for mode in MODES:
            assert replay_step.difference(replace(policy, decoder=mode), batch) is None, batch


STEP_FAULTS = {
    "starts of the replay forgotten": ("held_from", lambda b: torch.zeros_like(b.held_from)),
    "replayed rows written": ("end", lambda b: b.end - 1),
    "windows not narrowed": ("decoder_from", lambda b: b.held_from),
    "a row too many dropped": ("dropped", lambda b: b.dropped and [d + (d > 0) for d in b.dropped]),
    "nothing dropped": ("dropped", lambda b: None),
}


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_wrong_step_is_found(model, monkeypatch, capsys, fault):
    name, change = STEP_FAULTS[fault]
    right = bounded.Bounds.of

    def wrong(planned, device):
        bounds = right(planned, device)
        return replace(bounds, **{name: change(bounds)}) if bounds.held_from is not None else bounds

    monkeypatch.setattr(bounded.Bounds, "of", wrong)
    assert call(model) == 1
    assert "the model's step are not the plan's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "keep", "text"),
    [
        ((), 11, "keep_tokens: 11 is too few. Keep at least 12"),
        (("--drafts", "4"), 12, "Keep at least 13"),
        (("--level", "2", "--prompts", "absent.txt"), 12, "absent.txt"),
        (("--level", "2", "--tokens", "5000"), 12, "leave no room"),
    ],
)
def test_messages(model, monkeypatch, capsys, more, keep, text):
    monkeypatch.setattr(replay_engines, "run_engine", lambda job: pytest.fail("an engine was started"))
    assert call(model, *more, keep=keep) == 1
    assert text in capsys.readouterr().err


def test_a_folder_without_config(tmp_path, capsys):
    assert call(tmp_path) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["[]", "{", '{"additional_config": 3}', '{"additional_config": {"dsv41": []}}'])
def test_engine_args_must_be_an_object(model, capsys, bad):
    with pytest.raises(SystemExit):
        call(model, "--engine-args", bad)
    assert "not a JSON object of options" in capsys.readouterr().err


def fake_engines(monkeypatch, shift):
    """Engines whose token 7 is `shift[mode]` less likely than in off; the jobs they got."""
    jobs = []

    def run(job):
        jobs.append(job)
        p = np.array([0.5, 0.3, 0.2])
        top = dict(zip((7, 8, 9), np.log(p).tolist(), strict=True))
        top[7] -= shift[job["engine"]["additional_config"]["dsv41"]["decoder_replay"]]
        return [[(7, top)] * job["sampling"]["max_tokens"] for _ in job["prompts"]]

    monkeypatch.setattr(replay_engines, "run_engine", run)
    return jobs


def test_level_2_asks_each_mode_once_and_prints_the_distances(model, monkeypatch, capsys):
    jobs = fake_engines(monkeypatch, {"off": 0, "mask": 0.25, "compact": 0.5})
    given = {"dtype": "float32", "max_model_len": 100, "enable_prefix_caching": True, "additional_config": {"a": 1, "dsv41": {"exact": True}}}
    assert call(model, "--level", "2", "--tokens", "3", "--engine-args", json.dumps(given)) == 0
    assert [j["engine"]["additional_config"] for j in jobs] == [
        {"a": 1, "dsv41": {"exact": True, "decoder_replay": mode, "keep_tokens": 12}} for mode in ("off", "mask", "compact")
    ]
    for job in jobs:
        assert job["engine"]["model"] == str(model) and job["engine"]["dtype"] == "float32"
        assert job["engine"]["enable_prefix_caching"] is False, "replay after hits would count too"
        assert job["sampling"] == {"temperature": 0, "max_tokens": 3, "logprobs": 20, "ignore_eos": True}
        assert job["prompts"] == jobs[0]["prompts"]
    lengths = [len(p) for p in jobs[0]["prompts"]]
    assert min(lengths) == 1 and max(lengths) > 24 and {12, 13} <= set(lengths) and max(lengths) <= 97
    assert not {0, 1, 2, 3, 4} & {i for p in jobs[0]["prompts"] for i in p}
    lines = capsys.readouterr().out.splitlines()[-3:]
    n = len(lengths)
    for line, pair, distance in zip(lines, ("mask against off", "compact against off", "compact against mask"), (0.25, 0.5, 0.25), strict=True):
        name, numbers = line[: len(pair)], line[len(pair) :].split()
        assert name == pair and numbers[:2] == [f"{n}/{n}", f"{3 * n}/{3 * n}"]
        assert [float(x) for x in numbers[2:4]] == [distance, distance] and float(numbers[4]) > 0


@pytest.mark.parametrize(("bound", "code"), [("0.2", 0), ("0.05", 1), ("nan", 1)])
def test_the_bound_is_between_mask_and_compact(model, monkeypatch, capsys, bound, code):
    fake_engines(monkeypatch, {"off": 0, "mask": 0.5, "compact": 0.6})
    assert call(model, "--level", "both", "--batches", "5", "--bound", bound) == code
    out = capsys.readouterr().out
    assert "level 1" in out and "level 2" in out and ("DIFFERENT" in out) == bool(code)


def test_not_a_number_is_over_any_bound(model, monkeypatch):
    fake_engines(monkeypatch, {"off": 0, "mask": 0, "compact": float("nan")})
    assert call(model, "--level", "2", "--bound", "10") == 1


def test_an_engine_that_fails_is_reported(model, monkeypatch, capsys):
    def run(job):
        raise replay_engines.EngineError("the engine ended with code 3:\nout of memory")

    monkeypatch.setattr(replay_engines, "run_engine", run)
    assert call(model, "--level", "2") == 1
    assert "out of memory" in capsys.readouterr().err


def answer(*steps):
    return [(token, {i: float(np.log(p)) for i, p in top.items()}) for token, top in steps]


def test_comparison_by_hand():
    """Two prompts: equal but for the last token, and different from the first on."""
    a = [
        answer((1, {1: 0.6, 2: 0.4}), (2, {2: 0.5, 3: 0.25}), (3, {3: 0.9, 4: 0.1})),
        answer((5, {5: 0.7, 6: 0.3}), (6, {6: 1.0}), (7, {7: 1.0})),
    ]
    b = [
        answer((1, {1: 0.3, 2: 0.7}), (2, {2: 0.5, 3: 0.25}), (4, {4: 0.8, 5: 0.2})),
        answer((6, {6: 0.35, 5: 0.65}), (9, {9: 1.0}), (9, {9: 1.0})),
    ]
    got = replay_engines.compare(a, b)
    assert (got.first, got.prompts, got.same, got.tokens, got.steps, got.unlisted) == (1, 2, 2, 6, 4, 1)
    differences = [np.log(2), 0, np.log(0.9 / 0.2), np.log(0.7 / 0.65)]
    assert got.largest == pytest.approx(max(differences)) and got.median == pytest.approx(np.median(differences))
    kl = [
        0.6 * np.log(0.6 / 0.3) + 0.4 * np.log(0.4 / 0.7), 0, 0,
        0.7 * np.log(0.7 / 0.65) + 0.3 * np.log(0.3 / 0.35),
    ]
    assert got.kl == pytest.approx(np.mean(kl))
    same = replay_engines.compare(a, a)
    assert (same.same, same.largest, same.kl) == (6, 0, 0)


def test_divergence_scales_what_both_list(run_rng):
    rng = np.random.default_rng(run_rng.randrange(1 << 30))
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    left = {i: float(np.log(p[i])) for i in range(5)}
    right = {i: float(np.log(q[i])) for i in range(1, 6)}
    x, y = p[1:5] / p[1:5].sum(), q[1:5] / q[1:5].sum()
    assert replay_engines.divergence(left, right) == pytest.approx((x * np.log(x / y)).sum())
    assert replay_engines.divergence({1: 0.0}, {2: 0.0}) == float("inf")


def test_prompt_files(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Hello there\n\n[1, 2, 3]\n[not json\n  \nÜber\n", encoding="utf-8")
    assert replay_engines.read_prompts(path) == ["Hello there", [1, 2, 3], "[not json", "Über"]
    for bad in ("[]", "[1, -2]", "[1.5]", "[true]", '["a"]'):
        path.write_text("text\n" + bad)
        with pytest.raises(ValueError, match="line 2"):
            replay_engines.read_prompts(path)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="no prompt"):
        replay_engines.read_prompts(path)


def test_random_prompts_are_repeatable(model):
    cfg = ModelConfig.from_hf(json.loads((model / "config.json").read_text()))
    first, again = (replay_engines.random_prompts(np.random.default_rng(5), cfg, 12, 4000) for _ in range(2))
    assert first == again and any(len(p) > 24 for p in first) and any(len(p) < 12 for p in first)


CHILD = """#!{python}
import json, sys
assert sys.argv[1:3] == ["-m", "deepseek_v41_plugin.cli.replay_job"], sys.argv
job = json.load(sys.stdin)
if job["engine"] == "bad":
    print("it broke", file=sys.stderr)
    sys.exit(3)
if job["engine"] != "silent":
    json.dump([[[7, [[7, -0.5], [8, -1.5]]]]] * len(job["prompts"]), open(sys.argv[3], "w"))
"""


def test_a_child_process_answers_or_its_last_words_are_told(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(CHILD.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
    assert replay_engines.run_engine({"engine": "good", "prompts": ["a", [1]]}) == [[(7, {7: -0.5, 8: -1.5})]] * 2
    with pytest.raises(replay_engines.EngineError, match="code 3:\nit broke"):
        replay_engines.run_engine({"engine": "bad", "prompts": []})
    with pytest.raises(replay_engines.EngineError, match="code 0"):
        replay_engines.run_engine({"engine": "silent", "prompts": []})


def test_the_job_without_a_host(monkeypatch):
    """`replay_job.main` hands prompts and options through, and sorts the logprobs."""
    import types

    from deepseek_v41_plugin.cli import replay_job

    asked = {}

    class LLM:
        def __init__(self, **options):
            asked["engine"] = options

        def generate(self, prompts, sampling, use_tqdm):
            asked["prompts"], asked["sampling"] = prompts, sampling
            logprob = lambda value: types.SimpleNamespace(logprob=value)  # noqa: E731
            output = types.SimpleNamespace(token_ids=(4, 9), logprobs=[{9: logprob(-2.0), 4: logprob(-1.0)}, {9: logprob(-0.1)}])
            return [types.SimpleNamespace(outputs=[output])] * len(prompts)

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=dict))
    job = {"engine": {"model": "m"}, "prompts": ["text", [3, 4]], "sampling": {"logprobs": 20}}
    got = replay_job.main(job)
    assert asked == {"engine": {"model": "m"}, "prompts": ["text", {"prompt_token_ids": [3, 4]}], "sampling": {"logprobs": 20}}
    assert got == [[(4, [(4, -1.0), (9, -2.0)]), (9, [(9, -0.1)])]] * 2
