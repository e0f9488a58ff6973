# SPDX-License-Identifier: Apache-2.0
"""What users set: DSV41_IMPL, and `--additional-config '{"dsv41": {...}}'`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..replay import Policy, ReplayError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.config.parallel import EPLBConfig


class OptionError(ValueError):
    """An option is unknown or has a value of the wrong kind."""


@dataclass(frozen=True)
class Options:
    """The plugin's options under `additional_config["dsv41"]`.

    exact: activations in float64, whatever --dtype says; for tests.
    activation_quant: round the inputs of FP8 Linears and experts to FP8, as in training.
    batch_invariant: a row's bits do not depend on the rows beside it; slow.
    decoder_replay: off, mask or compact (`replay.Policy`); None: compact with --swa-bounded-replay, else off.
    keep_tokens: prompt tokens that run behind the last KV source.
    verify_profile: file of `dsv41 profile-verify`, for enable_adaptive_verification.
    draft_eplb_config: --eplb-config's num_redundant_experts (0), window_size and step_interval (the target's), for the draft.
    eplb_policy: fewest_moves or place (`eplb.fewest_moves`, `eplb.placement`).
    eplb_slack: balancedness that fewest_moves may give up for fewer moves, 0 to below 1.
    eplb_transport: auto, symm_mem or shm (`eplb.transport`).
    eplb_timeout: seconds after which a rebalance gives up on a rank.
    eplb_record: file (.npz) for the loads of all rebalances, for `dsv41 eplb-sim`; the draft's beside it.
    """

    exact: bool = False
    activation_quant: bool = True
    batch_invariant: bool = False
    decoder_replay: str | None = None
    keep_tokens: int = Policy.keep_tokens
    verify_profile: str | None = None
    draft_eplb_config: Mapping[str, int] = field(default_factory=dict)
    eplb_policy: str = "fewest_moves"
    eplb_slack: float = 0.0
    eplb_transport: str = "auto"
    eplb_timeout: int = 30
    eplb_record: str | None = None

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any] | None) -> Options:
        given = (additional_config or {}).get("dsv41", {})
        if not isinstance(given, Mapping):
            raise OptionError(f"additional_config.dsv41: {given!r} is not a mapping. Give {{option: value}}")
        known = {option.name: _KINDS[option.name] for option in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise OptionError(f"additional_config.dsv41.{name}: unknown option. Known: {', '.join(sorted(known))}")
            kind, what = known[name]
            if type(value) not in ((int, float) if kind is float else (kind,)) or name in _RANGES and not _RANGES[name](value):
                raise OptionError(f"additional_config.dsv41.{name}: {value!r} is not {what}")
        return cls(**given)


_RANGES = {
    "eplb_policy": ("fewest_moves", "place").__contains__,
    "eplb_slack": lambda value: 0 <= value < 1,
    "eplb_transport": ("auto", "symm_mem", "shm").__contains__,
    "eplb_timeout": lambda value: value >= 1,
}
_BOOLEAN = bool, "a boolean. Use true or false"
_KINDS = {
    "exact": _BOOLEAN,
    "activation_quant": _BOOLEAN,
    "batch_invariant": _BOOLEAN,
    "decoder_replay": (str, "a mode. Use off, mask or compact"),
    "keep_tokens": (int, "an integer. Use 140 or another number of tokens"),
    "verify_profile": (str, "a path. Give the file that `dsv41 profile-verify` wrote"),
    "draft_eplb_config": (dict, 'a mapping. Use {"num_redundant_experts": 0, "window_size": 1000, "step_interval": 3000}'),
    "eplb_policy": (str, "a policy. Use fewest_moves or place"),
    "eplb_slack": (float, "a number from 0.0 to below 1. Use 0.02"),
    "eplb_transport": (str, "a transport. Use auto, symm_mem or shm"),
    "eplb_timeout": (int, "a number of whole seconds. Use 30"),
    "eplb_record": (str, "a path. Give a file name that ends with .npz"),
}


def draft_eplb_config(parallel: ParallelConfig, options: Options) -> EPLBConfig:
    """The target's EPLB options with the draft's own values.  Raises OptionError naming the option."""
    own, known = options.draft_eplb_config, {"num_redundant_experts": 0, "window_size": 1, "step_interval": 1}
    for name, value in own.items():
        where = f"additional_config.dsv41.draft_eplb_config.{name}"
        if name not in known:
            raise OptionError(f"{where}: unknown option. Known: {', '.join(sorted(known))}")
        if type(value) is not int or value < known[name]:
            raise OptionError(f"{where}: {value!r} is not an integer of at least {known[name]}")
    return replace(parallel.eplb_config, **{"num_redundant_experts": 0} | own)


def replay_policy(vllm_config: VllmConfig, cfg: ModelConfig) -> Policy:
    """The replay policy a launch asks for.  Raises OptionError naming the option."""
    options = Options.parse(vllm_config.additional_config)
    cache = vllm_config.cache_config
    mode = options.decoder_replay
    if mode is None:
        mode = "compact" if cache.swa_bounded_replay and cfg.last_kv_source is not None else "off"
    try:
        policy = Policy(cfg.sliding_window, mode, options.keep_tokens, vllm_config.num_speculative_tokens)
    except ReplayError as error:
        raise OptionError(f"additional_config.dsv41.{error}") from None
    if mode != "off" and cfg.last_kv_source is None:
        raise OptionError(f"additional_config.dsv41.decoder_replay: {mode!r} needs a layer with compressed KV, and this model has none. Use off")
    if mode != "off" and cache.enable_prefix_caching and not cache.swa_bounded_replay:
        raise OptionError(
            f"additional_config.dsv41.decoder_replay: {mode!r} leaves most of a prompt without window KV behind layer"
            f" {cfg.last_kv_source}, which prefix caching would share. Add --swa-bounded-replay or --no-enable-prefix-caching, or use off"
        )
    return policy


def implementation() -> str:
    """DSV41_IMPL: auto (default), plugin or host."""
    choice = os.environ.get("DSV41_IMPL", "auto")
    if choice not in ("auto", "plugin", "host"):
        raise OptionError(f"DSV41_IMPL: {choice!r} is not a choice. Use auto, plugin or host")
    return choice
