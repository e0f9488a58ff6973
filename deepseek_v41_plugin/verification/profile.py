# SPDX-License-Identifier: Apache-2.0
"""Cost curves and calibration on disk, tied to the hardware and configuration they were measured on.

    {"format": 1, "identity": {...}, "verify": {"points": [[rows, ms], ...], "pads": [...]},
     "draft": {...}, "trim_ms": 0.1, "calibration": null | {"temperature": [...], ...}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .calibration import Calibration
from .costs import StepCosts
from .curve import Curve, CurveError

FORMAT = 1
REMEDY = "Measure again with `dsv41 profile-verify`."
Identity = Mapping[str, str | int | bool | None]


class ProfileError(ValueError):
    """A profile that cannot be read, or that belongs to another machine or configuration."""


@dataclass(frozen=True)
class Profile:
    """identity: what the costs depend on (device, ranks, model, formats, host version, drafts a step)."""

    identity: Identity
    costs: StepCosts
    calibration: Calibration | None = None

    def save(self, path: str | Path) -> None:
        """Writes the JSON; a reader sees the old file or the whole new one."""
        path = Path(path)
        data = {
            "format": FORMAT, "identity": dict(self.identity), "verify": asdict(self.costs.verify),
            "draft": asdict(self.costs.draft), "trim_ms": self.costs.trim_ms,
            "calibration": None if self.calibration is None else asdict(self.calibration),
        }
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path, identity: Identity | None = None) -> Profile:
        """The profile at `path`.  With `identity`, every field of it and of the file must be equal.

        Raises ProfileError naming the file, the field and the remedy.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as e:
            raise ProfileError(f"verify profile {path}: cannot be read ({e}). Correct the path, or measure again with `dsv41 profile-verify`.") from None
        found = data.get("format") if isinstance(data, dict) else None
        if type(found) is not int or found != FORMAT:
            raise ProfileError(f"verify profile {path}: format is {found!r}, not {FORMAT}. {REMEDY}")
        stored = data.get("identity")
        if not isinstance(stored, dict):
            raise ProfileError(f"verify profile {path}: identity is missing. {REMEDY}")
        if identity is not None:
            for name in sorted({*identity, *stored}):
                here, there = identity.get(name), stored.get(name)
                if here != there or (name in identity) != (name in stored):
                    raise ProfileError(f"verify profile {path}: {name} was {there!r} and is {here!r} here. {REMEDY}")
        trim = data.get("trim_ms")
        if isinstance(trim, bool) or not isinstance(trim, (int, float)):
            raise ProfileError(f"verify profile {path}: trim_ms is {trim!r}, not a number. {REMEDY}")
        try:
            costs = StepCosts(_curve(data, "verify"), _curve(data, "draft"), float(trim))
            raw = data.get("calibration")
            calibration = None if raw is None else Calibration.from_json(raw)
            drafts = stored.get("num_speculative_tokens")
            if calibration is not None and drafts is not None and len(calibration.temperature) != drafts:
                raise ValueError(f"calibration has {len(calibration.temperature)} positions for {drafts} drafts")
            return cls(stored, costs, calibration)
        except (ValueError, OverflowError) as e:
            raise ProfileError(f"verify profile {path}: {e}. {REMEDY}") from None


def _curve(data: dict, name: str) -> Curve:
    try:
        raw = data[name]
        return Curve(tuple((p[0], p[1]) for p in raw["points"]), tuple(raw["pads"]))
    except CurveError as e:
        raise ValueError(f"{name}.{e}") from None
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"{name}: not a curve of points and pads") from None
