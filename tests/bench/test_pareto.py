# SPDX-License-Identifier: Apache-2.0
"""bench/pareto.py: which rows are set against each other, and what it says of them."""

import csv

import pytest
from pareto import compare, point, read, show
from steps import COLUMNS

BASE = {"date": "2026-12-01", "commit": "c", "device": "H200", "vllm": "v", "torch": "t", "impl": "host", "humming": "0.1.19", "backends": "auto",
        "drafts": "0", "replay": "on", "chunk": "8192", "case": "decode-b8-c4096", "status": "ok", "unit": "ms", "said_per_row": "1.000"}


def row(median, spread=0.01, **more):
    values = {"median": f"{median}", "low": f"{median * (1 - spread)}", "high": f"{median * (1 + spread)}"}
    return BASE | {name: "" for name in COLUMNS if name not in BASE} | values | more


@pytest.fixture
def table(tmp_path):
    def run(*rows):
        path = tmp_path / "steps.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return compare(read(path))

    return run


def test_ours_is_set_against_the_fastest_host(table, capsys):
    (line,) = table(row(2.0, humming="absent"), row(1.6), row(3.0, backends="marlin"), row(1.0, impl="plugin", humming=""))
    assert line["times"] == pytest.approx(1.6) and line["host_backend"] == "auto, humming 0.1.19" and line["clear"]
    show([line])
    assert "goal 1.3 met" in capsys.readouterr().out
    (line,) = table(row(1.0, humming="absent"), row(1.2, impl="plugin", humming=""))
    show([line])
    said = capsys.readouterr().out
    assert "SLOWER" in said and "goal 1.3 NOT met" in said and "not vLLM as released" in said


def test_a_later_row_stands_and_a_failed_one_does_not(table):
    (line,) = table(row(9.0), row(2.0), row(0.1, status="OutOfMemory"), row(1.0, impl="plugin"), row(2.0, impl="plugin"))
    assert line["times"] == pytest.approx(1.0) and not line["clear"], "equal times are within each other's spread"
    assert not table(row(2.0), row(1.0, impl="plugin", drafts="5")), "with drafts and without are two things"


def test_drafts_count_by_what_they_say_and_kv_by_its_tokens(table):
    (line,) = table(row(2.0, drafts="5", said_per_row="2.0"), row(3.0, drafts="5", said_per_row="4.5", impl="plugin"))
    assert line["times"] == pytest.approx(1.5)
    (line,) = table(row(100, case="kv-c4096", unit="tokens/GiB", said_per_row=""),
                    row(190, case="kv-c4096", unit="tokens/GiB", said_per_row="", impl="plugin"))
    assert line["times"] == pytest.approx(1.9) and line["goal"] == 1.8


def test_points():
    decode = point(row(2.0, said_per_row="3.0"))
    assert (decode.other, decode.throughput) == (pytest.approx(1500), pytest.approx(12000))
    prefill = point(row(400, case="prefill-q32768-c0", said_per_row=""))
    assert (prefill.other, prefill.throughput) == (pytest.approx(100), pytest.approx(81920))
    assert point(row(1, case="start", unit="s")) is None
