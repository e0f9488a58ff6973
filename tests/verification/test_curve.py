# SPDX-License-Identifier: Apache-2.0
"""Cost curves: repair against brute force, padding, extrapolation, the file and its errors."""

import itertools
import json

import numpy as np
import pytest

from deepseek_v41_plugin.verification import Calibration, Curve, CurveError, Profile, ProfileError, StepCosts
from deepseek_v41_plugin.verification import slowest_costs
from deepseek_v41_plugin.verification.curve import repair


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


def samples(rng, most=600):
    sizes = rng.choice(np.arange(1, most), int(rng.integers(2, 12)), replace=False)
    return [(int(s), float(abs(5 + 0.02 * s + rng.normal(0, 2)) + 0.1)) for s in sizes for _ in range(3)]


def best_fit(cost, weight):
    """Least squares over all cuts into constant runs of rising means."""
    n, found = len(cost), (float("inf"), None)
    for cuts in itertools.product([False, True], repeat=n - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        means = [np.average(cost[a:b], weights=weight[a:b]) for a, b in itertools.pairwise(at)]
        if all(a <= b for a, b in itertools.pairwise(means)):
            fit = np.repeat(means, np.diff(at))
            found = min(found, (float((weight * (cost - fit) ** 2).sum()), fit.tolist()))
    return found[1]


def test_repair_is_the_nearest_rising_sequence(rng):
    for _ in range(30):
        n = int(rng.integers(1, 9))
        cost, weight = rng.normal(10, 3, n), rng.integers(1, 5, n).astype(float)
        assert np.allclose(repair(cost, weight), best_fit(cost, weight))


def test_costs_never_fall(rng):
    for _ in range(40):
        pads = sorted(set(rng.integers(1, 300, 4).tolist())) if rng.random() < 0.5 else []
        curve = Curve.fit(samples(rng), pads)
        assert (np.diff(curve.at(np.arange(2000))) >= 0).all()
        assert curve.at(2000) > curve.at(1000) or curve.points[0][1] == curve.points[-1][1]


def test_the_order_of_samples_does_not_matter(rng):
    for _ in range(10):
        found = samples(rng)
        assert Curve.fit(found) == Curve.fit([found[i] for i in rng.permutation(len(found))])


def test_exact_at_clean_points_and_linear_between(rng):
    curve = Curve(((4, 2.0), (8, 4.0), (16, 4.5)))
    assert curve.at([0, 1, 4, 6, 8, 12, 16]).tolist() == [2, 2, 2, 3, 4, 4.25, 4.5]
    assert curve.at(28) == pytest.approx(4.5 + 12 * 2.5 / 12)


def test_graphs_pad_and_above_them_nothing_is_blended():
    curve = Curve(((8, 1.0), (16, 2.0), (32, 6.0), (64, 10.0)), pads=(8, 16))
    assert curve.at([1, 8, 9, 16]).tolist() == [1, 1, 2, 2]
    assert curve.at([17, 32, 48]).tolist() == [6, 6, 8]


def test_a_single_point_grows_in_proportion():
    assert Curve(((10, 5.0),)).at([1, 10, 20]).tolist() == [5, 5, 10]


def test_the_slowest_rank_counts(rng):
    for _ in range(20):
        ranks = [StepCosts(Curve.fit(samples(rng)), Curve.fit(samples(rng, 90)), float(rng.random())) for _ in range(4)]
        both = slowest_costs(ranks)
        assert both == slowest_costs([ranks[i] for i in rng.permutation(4)])
        at = np.array(sorted({s for r in ranks for s, _ in r.verify.points}))
        assert np.allclose(both.verify.at(at), np.max([r.verify.at(at) for r in ranks], axis=0))
        assert both.trim_ms == max(r.trim_ms for r in ranks)


@pytest.mark.parametrize(
    ("points", "pads", "match"),
    [
        ((), (), "points: empty"),
        (((0, 1.0),), (), "size 0"),
        (((1.5, 1.0),), (), "size 1.5"),
        (((1, 0.0),), (), "0.0 ms at size 1"),
        (((1, float("nan")),), (), "nan ms"),
        (((2, 1.0), (2, 2.0)), (), "size 2 follows 2"),
        (((2, 2.0), (3, 1.0)), (), "1.0 ms at size 3 after 2.0 ms at 2"),
        (((1, 1.0),), (8, 4), "pads"),
        (((1, 1.0),), (0,), "pads"),
    ],
)
def test_what_is_no_curve_is_refused(points, pads, match):
    with pytest.raises(CurveError, match=match):
        Curve(points, pads)


IDENTITY = {"device": "NVIDIA H200", "tensor_parallel": 8, "model": "0f3a", "drafts": 5}


def stored(tmp_path, rng):
    costs = StepCosts(Curve.fit(samples(rng), (8, 16)), Curve.fit(samples(rng, 90)), 0.125)
    profile = Profile(IDENTITY, costs, Calibration((1.2, 0.7), (0.01, 0.02), (900, 500)))
    path = tmp_path / "profile.json"
    profile.save(path)
    return profile, path


def test_the_file_holds_everything(tmp_path, rng):
    profile, path = stored(tmp_path, rng)
    assert Profile.load(path, IDENTITY) == profile and Profile.load(path) == profile
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    Profile(IDENTITY, profile.costs).save(path)
    assert Profile.load(path, IDENTITY).calibration is None


def test_a_calibration_has_a_position_for_each_draft(tmp_path, rng):
    profile, path = stored(tmp_path, rng)
    Profile({"num_speculative_tokens": 3}, profile.costs, profile.calibration).save(path)
    with pytest.raises(ProfileError, match="calibration has 2 positions for 3 drafts.*profile-verify"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"device": "NVIDIA A100"}, "device was 'NVIDIA H200' and is 'NVIDIA A100' here"),
        ({"tensor_parallel": 4}, "tensor_parallel was 8 and is 4 here"),
        ({"host": "vllm 0.33.0"}, "host was None and is 'vllm 0.33.0' here"),
    ],
)
def test_another_machine_is_refused(tmp_path, rng, change, match):
    _, path = stored(tmp_path, rng)
    with pytest.raises(ProfileError, match=match + ".*profile-verify"):
        Profile.load(path, IDENTITY | change)
    with pytest.raises(ProfileError, match="drafts was 5 and is None"):
        Profile.load(path, {k: v for k, v in IDENTITY.items() if k != "drafts"})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "format is 2"),
        ({"identity": None}, "identity is missing"),
        ({"verify": {"points": [[1, 2.0], [2, 1.0]], "pads": []}}, "verify.points: 1.0 ms at size 2"),
        ({"draft": {"points": 3, "pads": []}}, "draft: not a curve"),
        ({"draft": None}, "draft: not a curve"),
        ({"trim_ms": "much"}, "trim_ms is 'much'"),
        ({"trim_ms": 10**400}, "int too large"),
        ({"draft": {"points": [[10**400, 1.0]], "pads": []}}, "draft.points: size 1"),
        ({"trim_ms": -1}, "trim_ms"),
        ({"calibration": {"temperature": [0.0], "error": [0], "count": [0]}}, "calibration.temperature"),
        ({"calibration": []}, "calibration"),
    ],
)
def test_a_damaged_file_is_refused_by_field(tmp_path, rng, change, match):
    _, path = stored(tmp_path, rng)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ProfileError, match=match):
        Profile.load(path, IDENTITY)


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ProfileError, match="cannot be read"):
        Profile.load(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ProfileError, match="format is None"):
        Profile.load(tmp_path / "list.json")
