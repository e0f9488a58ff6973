# SPDX-License-Identifier: Apache-2.0
"""What users set: DSV41_IMPL, and `--additional-config '{"dsv41": {...}}'`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


class OptionError(ValueError):
    """An option is unknown or has a value of the wrong kind."""


@dataclass(frozen=True)
class Options:
    """The plugin's options under `additional_config["dsv41"]`.

    exact: activations in float64, whatever --dtype says; for tests.
    activation_quant: round the inputs of FP8 Linears and experts to FP8, as in training.
    """

    exact: bool = False
    activation_quant: bool = True

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any] | None) -> Options:
        given = (additional_config or {}).get("dsv41", {})
        if not isinstance(given, Mapping):
            raise OptionError(f"additional_config.dsv41: {given!r} is not a mapping. Give {{option: value}}")
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise OptionError(f"additional_config.dsv41.{name}: unknown option. Known: {', '.join(sorted(known))}")
            if not isinstance(value, bool):
                raise OptionError(f"additional_config.dsv41.{name}: {value!r} is not a boolean. Use true or false")
        return cls(**given)


def implementation() -> str:
    """DSV41_IMPL: auto (default), plugin or host."""
    choice = os.environ.get("DSV41_IMPL", "auto")
    if choice not in ("auto", "plugin", "host"):
        raise OptionError(f"DSV41_IMPL: {choice!r} is not a choice. Use auto, plugin or host")
    return choice
