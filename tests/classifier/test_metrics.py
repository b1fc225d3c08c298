"""Measures agree with scikit-learn's and with what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from classifier.curves import fixed_mix_curve, ladder_curve, pair_curve, upper_hull
from classifier.metrics import bootstrap_interval, brier, calibration_error, log_loss, roc_auc

outcomes = st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=2, max_size=60)


@given(outcomes)
def test_probability_measures_are_scikit_learns(rows: list[tuple[int, bool]]) -> None:
    p = np.array([score / 20 for score, _ in rows])
    y = np.array([float(right) for _, right in rows])
    assert brier(p, y) == pytest.approx(float(np.mean((p - y) ** 2)))
    assert log_loss(p, y) == pytest.approx(sklearn_metrics.log_loss(y, np.clip(p, 1e-6, 1 - 1e-6), labels=[0, 1]))
    if 0 < y.sum() < len(y):
        assert roc_auc(p, y) == pytest.approx(sklearn_metrics.roc_auc_score(y, p))
    else:
        assert np.isnan(roc_auc(p, y))


def test_calibration_error_is_the_gap() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(40_000)
    y = (rng.random(40_000) < p).astype(np.float64)
    assert calibration_error(p, y) < 0.015
    assert calibration_error(np.full(1000, 0.7), np.r_[np.ones(400), np.zeros(600)]) == pytest.approx(0.3, abs=0.26)
    assert calibration_error(np.clip(p + 0.2, 0, 1), y) > 0.1


def test_bootstrap_draws_whole_groups() -> None:
    values = np.repeat([0.0, 1.0], 50)
    groups = np.repeat([0, 1], 50)
    found = bootstrap_interval(lambda rows: float(values[rows].mean()), groups, seed=1)
    # Two groups can only give 0, a half or 1: rows drawn one by one would give a narrow interval.
    assert (found.low, found.value, found.high) == (0.0, 0.5, 1.0)
    single = bootstrap_interval(lambda rows: float(values[rows].mean()), np.arange(100), seed=1)
    assert 0.35 < single.low < 0.5 < single.high < 0.65


scores = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=40
)


@given(scores, st.integers(0, 3))
def test_pair_curve_runs_from_weak_to_strong(rows: list[tuple[float, float]], levels: int) -> None:
    weak, strong = (np.array(column) for column in zip(*rows, strict=True))
    benefit = np.arange(len(rows)) % (levels + 1) * 1.0
    curve = pair_curve(benefit, weak, strong)
    assert curve.quality[0] == pytest.approx(weak.mean())
    assert curve.quality[-1] == pytest.approx(strong.mean())
    oracle = pair_curve(strong - weak, weak, strong)
    assert (oracle.quality >= curve.quality - 1e-9).all()
    if weak.mean() != strong.mean() and levels == 0:
        assert curve.apgr == pytest.approx(0.5)  # no order at all is a random order


def test_shares_of_a_known_curve() -> None:
    weak, strong = np.array([0.0, 0.0, 1.0, 1.0]), np.array([1.0, 1.0, 1.0, 1.0])
    curve = pair_curve(np.array([4.0, 3.0, 2.0, 1.0]), weak, strong)
    assert curve.share_recovering(0.5) == 0.25
    assert curve.share_holding(1.0) == 0.5
    assert curve.apgr == pytest.approx((0 + 0.5 + 1 + 1 + 1) / 5)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=30))
def test_hull_is_concave_and_above_all_points(points: list[tuple[int, int]]) -> None:
    cost, quality = (np.array(column) / 1000 for column in zip(*points, strict=True))
    hull_cost, hull_quality = upper_hull(cost, quality)
    assert (np.diff(hull_cost) > 0).all()
    assert (np.diff(hull_quality) > 0).all()
    slopes = np.diff(hull_quality) / np.diff(hull_cost)
    assert (np.diff(slopes) <= 1e-6 * np.maximum(slopes[:-1], 1)).all()
    assert (np.interp(cost, hull_cost, hull_quality) >= quality - 1e-6).all()


def test_an_oracle_beats_every_mix() -> None:
    rng = np.random.default_rng(3)
    right = (rng.random((500, 3)) < [0.5, 0.7, 0.9]).astype(np.float64)
    costs = np.array([1.0, 3.0, 10.0])
    oracle, mix = ladder_curve(right, right, costs), fixed_mix_curve(right, costs)
    blind = ladder_curve(np.tile(right.mean(axis=0), (500, 1)), right, costs)
    for share in (0.8, 0.95, 1.0):
        wanted = share * right[:, -1].mean()
        cost_oracle, cost_mix, cost_blind = (c.cost_holding(wanted) for c in (oracle, mix, blind))
        assert cost_oracle is not None
        assert cost_mix is not None
        assert cost_oracle < cost_mix
        assert cost_blind == pytest.approx(cost_mix)  # knowing only the means is a fixed mix
    assert mix.cost_holding(1.01) is None
    assert oracle.shares.sum(axis=1) == pytest.approx(1.0)
