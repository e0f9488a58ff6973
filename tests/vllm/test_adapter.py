# SPDX-License-Identifier: Apache-2.0
"""Options, choice of implementation, hooks and the n-gram gather, without an engine."""

from types import SimpleNamespace

import pytest
import torch

import deepseek_v41_plugin.vllm as adapter
from deepseek_v41_plugin.replay import Policy
from deepseek_v41_plugin.vllm import hooks
from deepseek_v41_plugin.vllm.options import OptionError, Options, replay_policy
from deepseek_v41_plugin.vllm.state import gather_ngrams


def test_options():
    assert Options.parse(None) == Options.parse({}) == Options(exact=False, activation_quant=True)
    assert Options.parse({"dsv41": {"exact": True}}).exact
    with pytest.raises(OptionError, match="dsv41.exakt: unknown option. Known: activation_quant, batch_invariant, decoder_replay"):
        Options.parse({"dsv41": {"exakt": True}})
    with pytest.raises(OptionError, match="dsv41.exact: 1 is not a boolean"):
        Options.parse({"dsv41": {"exact": 1}})
    with pytest.raises(OptionError, match="additional_config.dsv41: 'on' is not a mapping"):
        Options.parse({"dsv41": "on"})
    for option, value, what in (("keep_tokens", True, "an integer"), ("decoder_replay", None, "a mode"), ("verify_profile", 3, "a path")):
        with pytest.raises(OptionError, match=f"dsv41.{option}: {value!r} is not {what}"):
            Options.parse({"dsv41": {option: value}})


def launch(options: dict, prefixes=True, swa=True, drafts=5):
    """As much of a VllmConfig as the replay policy reads."""
    cache = SimpleNamespace(swa_bounded_replay=swa, enable_prefix_caching=prefixes)
    return SimpleNamespace(additional_config={"dsv41": options}, cache_config=cache, num_speculative_tokens=drafts)


CONFIG = SimpleNamespace(sliding_window=128, last_kv_source=20)


def test_replay_policy():
    assert replay_policy(launch({}), CONFIG) == Policy(128, "compact", 140, 5)
    assert replay_policy(launch({}, swa=False), CONFIG).decoder == "off"
    assert replay_policy(launch({"decoder_replay": "mask"}, swa=False, prefixes=False), CONFIG).decoder == "mask"
    assert replay_policy(launch({}), SimpleNamespace(sliding_window=128, last_kv_source=None)).decoder == "off"
    for options, more, text in (
        ({"decoder_replay": "on"}, {}, "dsv41.decoder_replay: 'on' is not a mode. Use one of off, mask, compact"),
        ({"keep_tokens": 133}, {}, "dsv41.keep_tokens: 133 is too few. Keep at least 134"),
        ({"decoder_replay": "compact"}, {"swa": False}, "dsv41.decoder_replay: 'compact' leaves most of a prompt"),
    ):
        with pytest.raises(OptionError, match=text):
            replay_policy(launch(options, **more), CONFIG)


def test_every_hook_is_in_this_host():
    assert [hook.find() for hook in hooks.HOOKS] == [None] * len(hooks.HOOKS)


def test_a_missing_hook_stands_aside_or_stops(monkeypatch):
    said = []
    monkeypatch.setattr(adapter.logger, "warning", lambda text, *args: said.append(text % args))
    gone = hooks.Hook("vllm.model_executor.models.registry", "NoSuchThing", "nothing")
    monkeypatch.setattr(hooks, "HOOKS", (gone,))
    adapter.register()
    assert len(said) == 1 and "stands aside" in said[0] and "NoSuchThing (nothing)" in said[0]
    monkeypatch.setenv("DSV41_IMPL", "plugin")
    with pytest.raises(RuntimeError, match="NoSuchThing"):
        adapter.register()


class Capability:
    def __init__(self, major, minor):
        self.major, self.minor = major, minor


@pytest.mark.parametrize(("capability", "plugin"), [((8, 0), True), ((9, 0), False), ((10, 0), False), ((12, 0), False)])
def test_auto_by_hardware(monkeypatch, capability, plugin):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda cls: Capability(*capability)))
    assert hooks.wanted()[0] is plugin
    for choice in ("plugin", "host"):
        monkeypatch.setenv("DSV41_IMPL", choice)
        assert hooks.wanted() == (choice == "plugin", f"DSV41_IMPL={choice}")


def test_host_choice_registers_nothing(monkeypatch):
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setenv("DSV41_IMPL", "host")
    monkeypatch.setattr(ModelRegistry, "register_model", lambda *args: pytest.fail("registered"))
    adapter.register()


def test_an_unknown_choice_is_named(monkeypatch):
    monkeypatch.setenv("DSV41_IMPL", "both")
    with pytest.raises(OptionError, match="DSV41_IMPL: 'both' is not a choice"):
        adapter.register()


def test_ngrams(run_rng):
    """Against a walk over each request's whole sequence; the history ends before this step's rows."""
    n, sequences, start, ids, positions = 4, [], [0], [], []
    history = torch.full((6, 40), 999)
    states = run_rng.sample(range(6), 3)
    for state in states:
        sequence = [run_rng.randrange(100) for _ in range(30)]
        done, count = run_rng.choice([0, 1, 2, 7]), run_rng.choice([1, 2, 5])
        history[state, :done] = torch.tensor(sequence[:done])
        ids += sequence[done : done + count]
        positions += range(done, done + count)
        start.append(len(ids))
        sequences.append(sequence)
    padded = [*ids, 5, 5]
    got = gather_ngrams(
        torch.tensor(padded), torch.tensor([*positions, 0, 0]), len(ids), torch.tensor(start), torch.tensor(states), history, n,
    )
    assert got[len(ids) :].eq(-1).all(), "padding rows have no tokens"
    for r, sequence in enumerate(sequences):
        for row in range(start[r], start[r + 1]):
            p = positions[row]
            assert got[row].tolist() == [sequence[p - b] if p >= b else -1 for b in range(n)]
