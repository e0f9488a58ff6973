# SPDX-License-Identifier: Apache-2.0
"""Cells of a bench: each is tried once, written at once, found again by the next start, and may fail alone."""

from __future__ import annotations

import csv
import re
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path

from rows import append, commit


class Lost(RuntimeError):
    """The device no longer answers: nothing further can run in this process."""


def spread(values: list[float]) -> dict[str, str]:
    return {name: f"{f(values):.5g}" for name, f in (("median", statistics.median), ("low", min), ("high", max))}


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def version(name: str) -> str:
    """Of an installed distribution, or "absent"."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


class Cells:
    """Rows of one csv.  `stamp`: leading columns of each row; `key`: those of its columns that tell a cell.

    columns: the further ones, so that rows of different cells fit one header.
    """

    def __init__(self, path: Path | None, stamp: dict, columns: tuple[str, ...], only: str = "", seconds: float = 1e9, again: bool = False):
        self.path, self.columns, self.only = path, columns, re.compile(only)
        self.stamp = {"date": date.today().isoformat(), "commit": commit()} | {k: str(v) for k, v in stamp.items()}
        self.end = time.monotonic() + seconds
        self.rows: list[dict] = []
        self.done: set[tuple] = set()
        if path and path.exists() and not again:
            with path.open(newline="") as file:
                self.done = {self._key(row) for row in csv.DictReader(file)}

    def _key(self, row: dict) -> tuple:
        return *(row[name] for name in self.stamp if name != "date"), row["case"]

    def wants(self, case: str) -> bool:
        """Asked for, not in the csv yet, and time left."""
        row = self.stamp | {"case": case}
        return bool(self.only.search(case)) and self._key(row) not in self.done and time.monotonic() < self.end

    def add(self, case: str, status: str = "ok", **values) -> dict:
        if unknown := set(values) - set(self.columns):
            raise ValueError(f"{case}: no column {', '.join(sorted(unknown))}; name it in `columns`")
        row = self.stamp | {"case": case, "status": status} | {name: values.get(name, "") for name in self.columns}
        self.rows.append(row)
        self.done.add(self._key(row))
        shown = "  ".join(f"{name} {value}" for name, value in values.items() if value != "")
        print(f"{case:30s} {'' if status == 'ok' else status + '  '}{shown}", flush=True)
        if self.path:
            append(self.path, [row])
        return row

    def run(self, case: str, measure: Callable[[], dict | list[dict]]) -> None:
        """Measure `case` if it is wanted; what it raises becomes its row."""
        if not self.wants(case):
            return
        begin = time.perf_counter()
        try:
            found = measure()
        except Exception as error:  # noqa: BLE001  one cell must not end the others
            traceback.print_exc()
            first = (str(error).strip() or "no message").splitlines()[0]
            self.add(case, f"{type(error).__name__}: {first[:160]}")
            self._alive(error)
            return
        for values in found if isinstance(found, list) else [found]:
            self.add(case, seconds=f"{time.perf_counter() - begin:.1f}", **values)

    @staticmethod
    def _alive(error: Exception) -> None:
        import gc

        import torch

        if not torch.cuda.is_available():
            return
        error.__traceback__ = None
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as lost:
            raise Lost("the device is lost: start again, what is done is not repeated") from lost
