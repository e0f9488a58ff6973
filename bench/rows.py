# SPDX-License-Identifier: Apache-2.0
"""What every bench does with its results: rows of a csv, stamped with the commit."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path


def append(path: Path, rows: list[dict]) -> None:
    """Add `rows` (equal keys) to a csv; a new file gets the header."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def commit() -> str:
    """The short hash; DSV41_COMMIT where there is no git, as on a lent machine."""
    return os.environ.get("DSV41_COMMIT") or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
