# SPDX-License-Identifier: Apache-2.0
"""Typed reading of one section of a config.json, with one-line errors."""

import math
from collections.abc import Mapping
from typing import Any

_MISSING = object()
# The ceiling of every size and count that has no narrower one.
LARGEST = 1 << 24


class ConfigError(ValueError):
    """A config.json that cannot be served; ``SECTION.FIELD: problem. remedy``."""

    def __init__(self, where: str, problem: str, remedy: str):
        super().__init__(f"{where}: {problem}. {remedy}.")
        self.where = where


def shorten(value: Any, limit: int = 60) -> str:
    """``repr(value)`` on one line, at most ``limit`` characters."""
    try:
        text = repr(value).replace("\n", " ")
    except (ValueError, RecursionError):
        # Integers of thousands of digits and very deep nesting have no repr.
        text = f"<{type(value).__name__} too large to show>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


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

    def integer(self, field: str, low: int = 1, high: int = LARGEST, default=_MISSING) -> int:
        """An int between ``low`` and ``high``, both included."""
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(field, "an integer", value)
        if not low <= value <= high:
            span = f"between {low} and {high}"
            raise self.fail(field, f"{shorten(value)} is out of range", f"it must be {span}")
        return value

    def number(self, field: str, low: float, strict: bool = True, default=_MISSING) -> float:
        """A finite float > ``low`` (>= if not ``strict``); ints are accepted."""
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong_type(field, "a number", value)
        try:
            got = float(value)
        except OverflowError:
            got = math.inf
        if not math.isfinite(got) or got < low or (strict and got == low):
            span = f"finite and {'above' if strict else 'at least'} {low:g}"
            raise self.fail(field, f"{shorten(value)} is out of range", f"it must be {span}")
        return got

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
        """The value, which must equal ``want`` in type and value (neither 1.0 nor True is 1)."""
        value = self.get(field, default)
        typed = isinstance(value, type(want)) and isinstance(value, bool) == isinstance(want, bool)
        if not typed or value != want:
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
