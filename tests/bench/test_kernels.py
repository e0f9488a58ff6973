# SPDX-License-Identifier: Apache-2.0
"""bench/kernels.py on small shapes, and the measure of error that it trusts."""

import csv
import importlib.util
import math

import pytest
import torch
from hopper.cases import CASES, Make
from hopper.sweep import SWEEPS, configs
from hopper.timing import L2, SETS, Work, checked, error, sets_for


def test_every_case_runs_and_equals_its_reference(bench, tmp_path):
    path = tmp_path / "kernels.csv"
    bench("kernels.py", "--device", "cpu", "--csv", str(path))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"].split("/")[0] for row in rows} == {case.op for case in CASES}
    assert all(row["status"] == "ok" and float(row["error"]) == 0 for row in rows), [r["case"] for r in rows if r["status"] != "ok"]
    assert all(row["percent"] == row["roof_us"] == "" for row in rows), "nothing is known of this device's roofline"


def test_errors_are_seen(run_rng):
    torch.manual_seed(run_rng.randrange(1 << 30))
    x = torch.randn(4, 8)
    assert error(x, x) == 0 and error((x, x), (x, x + 0.5)) > 0.01
    assert math.isnan(error(torch.where(x > x.max() - 1e-6, math.nan, x), x))
    rows = torch.tensor([[3, 5, 9, -1]])
    assert error(rows, rows.flip(1)) == 0, "a choice is a set"
    assert error(torch.tensor([[3, 5, 8, -1]]), rows) == error(torch.tensor([[3, 5, 5, -1]]), rows) == 0.25
    assert error(torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8)) == 0.5
    for other in (x[:3], (x, x)):
        with pytest.raises(ValueError):
            error(other, x)


def test_what_an_op_writes_into_is_part_of_its_result():
    def good(x, cache):
        cache[: len(x)] = x

    x, cache = torch.ones(3, 2), torch.zeros(4, 2)
    work = Work((x, cache), 1, written=(1,))
    wanted = work.result(good)
    assert checked(work, good, wanted, 64) == 0 and not cache.any(), "each run has a copy of its own"
    assert checked(work, lambda x, cache: None, wanted, 64) == 1


def test_input_sets_outgrow_the_cache():
    for size in (1, 1 << 20, 9 << 20, L2, 10 * L2):
        assert sets_for(size) * size >= 3 * L2 or sets_for(size) == SETS
    assert sets_for(10 * L2) == 1


def test_shared_pages_outgrow_the_cache(monkeypatch):
    """Keys of a single request are 9 MB: without a larger pool all input sets would read them from the L2."""
    made = []

    def pool(self, record, blocks, states):
        made.append(blocks * states * record.width)
        return torch.empty(blocks, 1, 1)

    monkeypatch.setattr(Make, "pool", pool)
    selects = next(case for case in CASES if case.op == "index_select")
    make = Make("cpu", small=False)
    for name in ("plain-128K", "reader-512K", "plain-128K-v4"):
        selects.build(make, 1, *selects.variants[name])
    assert len(made) == 2 and min(made) >= 3 * L2, "one a record: the sets take other blocks of it"


@pytest.mark.parametrize("rows, choice", [(8, (64, 16)), (64, (128, 64)), (8192, (128, 64))])
def test_group_linear_starts_from_its_own_configurations(rows, choice):
    """The rows' table has one more, for 128 rows, and other stages."""
    from deepseek_v41_plugin.kernels.linear.triton_group import CONFIGS

    base = next((config for most, config in CONFIGS.items() if rows <= most), CONFIGS[64])
    assert (base.bm, base.bn) == choice
    for label, config in configs("group_linear", rows):
        field, _ = label.split("=")
        assert config._replace(**{field: getattr(base, field)}) == base


@pytest.mark.parametrize("op", sorted(SWEEPS))
def test_configurations_differ_from_the_choice_in_one_field(op):
    assert importlib.util.find_spec("triton")
    found = dict(configs(op, 64))
    assert len(found) >= 4 and len(set(map(str, found.values()))) == len(found)
    for label, config in found.items():
        field, value = label.split("=")
        assert str(getattr(config, field)) == value
