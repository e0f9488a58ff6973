# SPDX-License-Identifier: Apache-2.0
"""`dsv41 eplb-sim`: what it prints, writes and refuses."""

import csv
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from deepseek_v41_plugin.cli import curves, eplb_sim, main
from deepseek_v41_plugin.eplb import simulate


@pytest.fixture
def loads(rng):
    return rng.permuted(np.tile((1e5 / np.arange(1, 25)).astype(int), (7, 3, 1)), axis=2)


@pytest.fixture
def path(tmp_path, loads):
    simulate.save(tmp_path / "loads.npz", loads, "bread & butter")
    return tmp_path / "loads.npz"


def call(path, *more):
    return main.main(["eplb-sim", str(path), "--ranks", "8", "--redundant", "8", *map(str, more)])


@pytest.mark.parametrize("policy", simulate.POLICIES)
def test_table_and_csv(path, loads, tmp_path, capsys, policy):
    assert call(path, "--policy", policy, "--csv", tmp_path / "out.csv", "--expert-bytes", 10**7) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bread & butter: 7 windows, 3 layers, 24 + 8 experts on 8 ranks"
    assert lines[1] == "ranks 8 (given), redundant 8 (given), expert bytes 10000000 (given)"
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    even = simulate.uniform(loads, np.random.default_rng(0))
    for name, of in ((policy, loads), ("none", loads), ("uniform routing", even)):
        expected = simulate.replay(of, 8, 8, simulate.POLICIES[name if name == policy else "none"])
        mine = [row for row in rows if row["curve"] == name]
        assert [row["window"] for row in mine] == list("0123456")
        assert [float(row["balancedness_mean"]) for row in mine] == pytest.approx(expected.balancedness.mean(1), abs=1e-6)
        assert [float(row["balancedness_worst"]) for row in mine] == pytest.approx(expected.balancedness.min(1), abs=1e-6)
        assert [int(row["slots_moved"]) for row in mine] == expected.moved.sum(1).tolist()
        assert [int(row["experts_moved"]) for row in mine] == expected.crossed.sum(1).tolist()
        line = next(line for line in lines[3:] if line.startswith(name))
        mean, worst, slots, experts, gb, bars = line[len(name) :].split()
        assert float(mean) == pytest.approx(expected.balancedness.mean(), abs=6e-4)
        assert float(worst) == pytest.approx(expected.balancedness.min(1).mean(), abs=6e-4)
        assert int(slots) == expected.moved.sum() and int(experts) == expected.crossed.sum()
        assert float(gb) == pytest.approx(int(experts) / 100, abs=0.006)
        assert bars == curves.sparkline(expected.balancedness.mean(1))
    assert len(lines) == (5 if policy == "none" else 6)


GIVEN = {"ranks": 4, "redundant": 8, "expert_bytes": 5 * 10**7}
RECORDED = {"ranks": 2, "redundant": 16, "expert_bytes": 7 * 10**7}


@pytest.mark.parametrize("given", [(), ("ranks",), ("redundant", "expert_bytes"), tuple(GIVEN)])
@pytest.mark.parametrize("recorded", [(), ("redundant",), ("ranks", "expert_bytes"), tuple(RECORDED)])
def test_where_sizes_come_from(tmp_path, loads, capsys, given, recorded):
    simulate.save(tmp_path / "x.npz", loads, **{field: RECORDED[field] for field in recorded})
    options = [text for field in given for text in ("--" + field.replace("_", "-"), str(GIVEN[field]))]
    assert main.main(["eplb-sim", str(tmp_path / "x.npz"), *options]) == 0
    sizes, sources = {}, {}
    for field, default in {"ranks": 8, "redundant": 0, "expert_bytes": eplb_sim.EXPERT_BYTES}.items():
        sources[field] = "given" if field in given else "recorded" if field in recorded else "default"
        sizes[field] = {"given": GIVEN[field], "recorded": RECORDED[field], "default": default}[sources[field]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"x.npz: 7 windows, 3 layers, 24 + {sizes['redundant']} experts on {sizes['ranks']} ranks"
    assert lines[1] == ", ".join(f"{field.replace('_', ' ')} {sizes[field]} ({sources[field]})" for field in sizes)
    expected = simulate.replay(loads, sizes["ranks"], sizes["redundant"], simulate.POLICIES["fewest_moves"])
    mean, _, slots, experts, gb, _ = next(line for line in lines if line.startswith("fewest_moves")).split()[1:]
    assert float(mean) == pytest.approx(expected.balancedness.mean(), abs=6e-4) and int(slots) == expected.moved.sum()
    assert float(gb) == pytest.approx(int(experts) * sizes["expert_bytes"] / 1e9, abs=0.006)


def test_the_released_expert_is_its_tensors():
    shapes = {"w1": (2304, 2560), "w3": (2304, 2560), "w2": (5120, 1152), "s1": (2304, 160), "s3": (2304, 160), "s2": (5120, 72)}
    assert eplb_sim.EXPERT_BYTES == sum(a * b for a, b in shapes.values())


def test_slack_is_handed_on(path, loads, capsys):
    assert call(path, "--slack", "0.9") == 0
    assert " 0 " in capsys.readouterr().out.splitlines()[3], "nothing is worth a move"
    assert call(path, "--slack", "1") == 1
    assert "dsv41 eplb-sim: slack: 1.0" in capsys.readouterr().err


def test_the_drawing_has_each_curve(path, tmp_path):
    assert call(path, "--plot", tmp_path / "out.svg") == 0
    root = ET.parse(tmp_path / "out.svg").getroot()
    lines = root.findall("{*}polyline")
    texts = [t.text for t in root.findall("{*}text")]
    assert [len(line.get("points").split()) for line in lines] == [7, 7, 7]
    assert {"fewest_moves", "none", "uniform routing", "window"} <= set(texts)


def test_points_are_where_the_values_are():
    root = ET.fromstring(curves.svg("a < b & c", "t", {"x": np.array([0.0, 1.0, 0.5])}))
    points = [tuple(map(float, p.split(","))) for p in root.find("{*}polyline").get("points").split()]
    (x0, low), (x1, high), (x2, middle) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and middle == pytest.approx((low + high) / 2, abs=0.2) and high < low
    grid = {t.text: float(t.get("y")) - 4 for t in root.findall("{*}text") if t.get("text-anchor") == "end"}
    assert grid["0"] == pytest.approx(low, abs=0.1) and grid["1"] == pytest.approx(high, abs=0.1)
    assert ET.fromstring(curves.svg("one", "t", {"x": np.array([0.5])})).find("{*}polyline") is not None


def test_sparkline():
    assert curves.sparkline(np.array([0, 0.125, 0.49, 0.99, 1])) == "▁▂▄██"
    assert curves.sparkline(np.repeat([0.0, 1.0], 100), 4) == "▁▁██"


@pytest.fixture
def no_replay(monkeypatch):
    """Fails a test that comes to the replay, which may be long."""
    monkeypatch.setattr(simulate, "replay", lambda *args: pytest.fail("replayed before it was refused"))


def test_png_without_matplotlib(path, tmp_path, monkeypatch, capsys, no_replay):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(path, "--plot", tmp_path / "out.png") == 1
    assert "out.png: PNG needs matplotlib. Install it, or choose an .svg file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more,text",
    [
        (("--plot", "out.pdf"), "out.pdf: not an .svg or .png file"),
        (("--plot", "absent/out.svg"), "absent/out.svg: there is no folder absent. Make it"),
        (("--csv", "absent/out.csv"), "absent/out.csv: there is no folder absent. Make it"),
        (("--csv", "/"), "/: a folder. Name a file in it"),
        (("--policy", "place", "--slack", "0.1"), "--slack: policy place does not take it. Leave it out, or choose --policy fewest_moves"),
        (("--policy", "none", "--slack", "0"), "--slack: policy none does not take it. Leave it out, or choose --policy fewest_moves"),
    ],
)
def test_refusals(path, tmp_path, monkeypatch, capsys, no_replay, more, text):
    monkeypatch.chdir(tmp_path)
    assert call(path, *more) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"dsv41 eplb-sim: {text}") and not out and [found.name for found in tmp_path.iterdir()] == ["loads.npz"]


def test_ranks_that_do_not_fit(path, capsys):
    assert call(path, "--redundant", "9") == 1
    assert "dsv41 eplb-sim: redundant: 24 experts and 9 more cannot be cut over 8 ranks. Choose 8 or 16" in capsys.readouterr().err


def test_a_file_that_is_no_recording(tmp_path, capsys):
    assert call(tmp_path / "absent.npz") == 1
    (tmp_path / "x.npz").write_text("text")
    assert call(tmp_path / "x.npz") == 1
    assert "absent.npz" in (err := capsys.readouterr().err) and "x.npz: " in err


@pytest.mark.parametrize("option,value", [("--ranks", "0"), ("--ranks", "-8"), ("--redundant", "x"), ("--policy", "best")])
def test_arguments(path, capsys, option, value):
    with pytest.raises(SystemExit):
        call(path, option, value)
    assert option in capsys.readouterr().err
