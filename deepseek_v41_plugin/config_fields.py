# SPDX-License-Identifier: Apache-2.0
"""Typed reading of one section of a config.json, with one-line errors."""

import math
from collections.abc import Mapping
from typing import Any

_MISSING = object()


class ConfigError(ValueError):
    """A config.json that cannot be served; ``SECTION.FIELD: problem. remedy``."""

    def __init__(self, where: str, problem: str, remedy: str):
        super().__init__(f"{where}: {problem}. {remedy}.")
        self.where = where


def shorten(value: Any) -> str:
    """``repr(value)`` on one line, at most 60 characters."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


class Section:
    """One JSON object of the config; every getter raises ConfigError naming the field."""

    def __init__(self, raw: Any, name: str = ""):
        self.name = name
        if not isinstance(raw, Mapping):
            raise ConfigError(
                name or "config",
                f"expected an object, got {shorten(raw)}",
                "use the config.json that came with the checkpoint",
            )
        self.raw = raw

    def path(self, field: str) -> str:
        return f"{self.name}.{field}" if self.name else field

    def fail(self, field: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(self.path(field), problem, remedy)

    def get(self, field: str, default: Any = _MISSING) -> Any:
        value = self.raw.get(field, default)
        if value is _MISSING:
            raise self.fail(
                field, "missing", "add it as in the released DeepSeek-V4.1-Flash config.json"
            )
        return value

    def _wrong_type(self, field: str, want: str, value: Any) -> ConfigError:
        return self.fail(
            field, f"expected {want}, got {shorten(value)}", f"set it to {want}"
        )

    def integer(self, field: str, low: int = 1, high: int | None = None, default=_MISSING) -> int:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(field, "an integer", value)
        if value < low or (high is not None and value > high):
            span = f"at least {low}" if high is None else f"between {low} and {high}"
            raise self.fail(field, f"{shorten(value)} is out of range", f"it must be {span}")
        return value

    def number(self, field: str, low: float, strict: bool = True, default=_MISSING) -> float:
        """A finite float > ``low`` (>= if not ``strict``); ints are accepted."""
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong_type(field, "a number", value)
        if not math.isfinite(value) or value < low or (strict and value == low):
            span = f"{'above' if strict else 'at least'} {low:g}"
            raise self.fail(field, f"{value} is out of range", f"it must be finite and {span}")
        return float(value)

    def integers(self, field: str, default=_MISSING) -> tuple[int, ...]:
        value = self.get(field, default)
        if not isinstance(value, (list, tuple)) or any(
            isinstance(v, bool) or not isinstance(v, int) for v in value
        ):
            raise self._wrong_type(field, "a list of integers", value)
        return tuple(value)

    def ascending(self, field: str, limit: int, default=_MISSING) -> tuple[int, ...]:
        """A strictly ascending list of layer indices below ``limit``."""
        value = self.integers(field, default)
        if any(not 0 <= v < limit for v in value) or any(
            b <= a for a, b in zip(value, value[1:])
        ):
            raise self.fail(
                field,
                f"{shorten(list(value))} is not a strictly ascending list of layer ids",
                f"list each layer once, in order, between 0 and {limit - 1}",
            )
        return value

    def exactly(self, field: str, want: Any, default=_MISSING) -> Any:
        """The value, which must equal ``want`` in type and value."""
        value = self.get(field, default)
        same = isinstance(value, bool) == isinstance(want, bool) and value == want
        if not same:
            raise self.fail(
                field,
                f"{shorten(value)} is not supported",
                f"only {want!r} is, as DeepSeek-V4.1 was released with",
            )
        return value

    def multiple(self, field: str, value: int, of: int, why: str) -> None:
        if value % of:
            raise self.fail(
                field, f"{value} is not a multiple of {of}", f"{why} needs a multiple of {of}"
            )
