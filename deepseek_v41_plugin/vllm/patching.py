# SPDX-License-Identifier: Apache-2.0
"""How a function of the host is replaced."""

from __future__ import annotations

from functools import wraps


def wrap(owner, name: str, replacement) -> None:
    """Replace `owner.name` by `replacement(original, ...)`, once."""
    original = getattr(owner, name)
    if getattr(original, "dsv41", False):
        return

    @wraps(original)
    def wrapper(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    wrapper.dsv41 = True
    setattr(owner, name, wrapper)
