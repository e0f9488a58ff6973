# SPDX-License-Identifier: Apache-2.0
"""Cells of a bench: written at once, not repeated, and alone in their failure."""

import csv

import pytest
from hopper.cells import Cells


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_failing_cell_is_a_row_and_the_next_start_goes_on(tmp_path, capsys):
    path, calls = tmp_path / "x.csv", []

    def cells(**options):
        return Cells(path, {"impl": "a", "drafts": 0}, ("ms", "seconds"), **options)

    def broken():
        raise ValueError("first line\nsecond")

    first = cells()
    first.run("one", lambda: calls.append("one") or {"ms": 1})
    first.run("two", broken)
    first.run("one", broken)
    assert [row["status"] for row in read(path)] == ["ok", "ValueError: first line"]
    second = cells()
    for name in ("one", "two", "three"):
        second.run(name, lambda name=name: calls.append(name) or [{"ms": 1}, {"ms": 2}])
    assert calls == ["one", "three"] and [row["case"] for row in read(path)] == ["one", "two", "three", "three"]
    assert all(row["date"] and row["impl"] == "a" for row in read(path))
    assert cells(again=True).wants("one") and not cells(only="^t").wants("one") and not cells(seconds=0).wants("four")
    assert Cells(path, {"impl": "b", "drafts": 0}, ("ms", "seconds")).wants("one")
    with pytest.raises(ValueError, match="no column other"):
        second.add("five", other=1)
