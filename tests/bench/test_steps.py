# SPDX-License-Identifier: Apache-2.0
"""bench/steps.py from its command line, in its reduced form; a second start repeats nothing."""

import csv


def test_steps_with_drafts_and_profile(bench, tmp_path):
    path = tmp_path / "steps.csv"
    args = ("--impl", "plugin", "--device", "cpu", "--kv-gib", "0.05", "--memory", "0.05", "--runs", "2", "--drafts", "3",
            "--accepted", "2", "--only", "start|pool|kv|decode-b3-c64", "--csv", str(path))
    text = bench("steps.py", *args, "--profile")
    with path.open(newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"start", "pool", "kv-c64", "kv-c256", "decode-b3-c64"}
    assert all(row["status"] == "ok" for row in rows.values()), text
    decode = rows["decode-b3-c64"]
    assert decode["finite"] == "True" and 1 <= float(decode["said_per_row"]) <= 4 and float(decode["median"]) > 0
    assert float(rows["kv-c256"]["median"]) > float(rows["kv-c64"]["median"]), "a longer request shares its window with more tokens"
    assert 1 <= float(rows["pool"]["most"]) <= 4 and int(rows["pool"]["used"]) >= 2
    assert (tmp_path / "steps-profile.csv").exists() and "us of kernels a step" in text
    assert "nothing left to measure" in bench("steps.py", *args)


def test_prefill_on_context(bench, tmp_path):
    path = tmp_path / "steps.csv"
    bench("steps.py", "--impl", "plugin", "--device", "cpu", "--kv-gib", "0.05", "--memory", "0.05", "--runs", "1",
          "--only", "prefill-q80-c128", "--csv", str(path))
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["status"] == "ok" and row["finite"] == "True" and float(row["tokens_per_s"]) > 0
