"""Bounds are those of the textbooks, hold as often as they say, and close in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, t  # type: ignore[import-untyped]

from policies.intervals import (
    binomial_lower,
    binomial_upper,
    bounded_upper,
    is_mean_shown_below,
    skewed_interval,
)


@given(st.integers(0, 400), st.integers(1, 400), st.sampled_from([0.9, 0.95, 0.99]))
def test_binomial_bounds_are_clopper_and_pearsons(num_hits: int, extra: int, confidence: float) -> None:
    num_trials = num_hits + extra
    assert binomial_upper(num_hits, num_trials, confidence) == pytest.approx(
        beta.ppf(confidence, num_hits + 1, num_trials - num_hits), abs=1e-9
    )
    lower = beta.ppf(1 - confidence, num_hits, num_trials - num_hits + 1) if num_hits else 0.0
    assert binomial_lower(num_hits, num_trials, confidence) == pytest.approx(lower, abs=1e-9)


def test_published_sample_sizes_certify() -> None:
    assert binomial_upper(13, 134, 0.95) <= 0.15
    assert binomial_upper(14, 134, 0.95) > 0.15
    assert binomial_upper(4, 89, 0.95) <= 0.105


def test_no_trials_bound_nothing() -> None:
    assert (binomial_lower(0, 0, 0.95), binomial_upper(0, 0, 0.95)) == (0.0, 1.0)
    assert bounded_upper([], [], 0.95) == pytest.approx(1.0)


@pytest.mark.parametrize("mean", [0.01, 0.1, 0.5])
def test_bounded_upper_covers_and_narrows(mean: float) -> None:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(200):
        drawn = rng.beta(2 * mean, 2 * (1 - mean), size=300)
        found.append(bounded_upper(drawn, np.ones(300), 0.9))
    assert np.mean(np.array(found) >= mean) >= 0.9
    wide = np.mean(found) - mean
    many = rng.beta(2 * mean, 2 * (1 - mean), size=30_000)
    assert 0 < bounded_upper(many, np.ones(30_000), 0.9) - mean < wide / 3


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.6, 0.99))
def test_bounds_enclose_the_sample_mean(values: list[float], confidence: float) -> None:
    ones = np.ones(len(values))
    high, mirrored = bounded_upper(values, ones, confidence), bounded_upper(1 - np.array(values), ones, confidence)
    assert high >= np.mean(values) - 1e-6
    assert 1 - mirrored <= np.mean(values) + 1e-6


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5)), min_size=1, max_size=8))
def test_counts_are_repetitions(rows: list[tuple[float, int]]) -> None:
    values, counts = zip(*rows, strict=True)
    repeated = np.repeat(values, counts)
    assert bounded_upper(values, counts, 0.95) == pytest.approx(
        bounded_upper(repeated, np.ones(len(repeated)), 0.95), abs=1e-9
    )


def test_skewed_rows_are_covered_where_the_normal_interval_is_not() -> None:
    rng = np.random.default_rng(2)
    rows = np.where(rng.random((1000, 400)) < 0.02, rng.exponential(50.0, (1000, 400)), 0.0)
    found = [skewed_interval(each, 0.95) for each in rows]
    ours = np.mean([each.low <= 1.0 <= each.high for each in found])
    half = 1.96 * rows.std(axis=1) / 20
    normal = np.mean(np.abs(rows.mean(axis=1) - 1.0) <= half)
    assert ours > normal
    assert ours >= 0.87


@settings(max_examples=50)
@given(st.lists(st.floats(-100, 100), min_size=12, max_size=40))
def test_a_skewed_interval_is_mirrored_with_its_rows_and_never_narrower_than_students(rows: list[float]) -> None:
    values = np.array(rows)
    found, mirrored = skewed_interval(values, 0.95), skewed_interval(-values, 0.95)
    assert (mirrored.low, mirrored.high) == (pytest.approx(-found.high), pytest.approx(-found.low))
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    assert min(found.value - found.low, found.high - found.value) >= half - 1e-9


def test_rows_without_skew_or_heavy_tails_have_students_interval() -> None:
    rows = np.tile([-1.0, 1.0], 20)
    half = t.ppf(0.975, 80) * rows.std(ddof=1) / np.sqrt(40)
    found = skewed_interval(rows, 0.95)
    assert (found.low, found.high) == (pytest.approx(-half, rel=1e-5), pytest.approx(half, rel=1e-5))


def test_the_longer_tail_has_the_longer_end() -> None:
    """Hall's cubic, solved by bisection, for ten rows of which one is far above the others."""
    found = skewed_interval(np.array([0.0] * 9 + [10.0]), 0.95)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0 - 2.8395608654, 9.5077163415), abs=1e-9)


@pytest.mark.parametrize("count", [0, 1])
def test_one_row_has_no_interval(count: int) -> None:
    with pytest.raises(ValueError, match=f"2 rows or more, not {count}"):
        skewed_interval(np.ones(count), 0.95)


@pytest.mark.parametrize("bad", [[-0.1], [1.1], [float("nan")]])
def test_values_out_of_range_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="values must lie"):
        bounded_upper(bad, [1.0], 0.95)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, float("nan")])
def test_a_confidence_is_below_one(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        binomial_upper(1, 2, confidence)
    with pytest.raises(ValueError, match="confidence"):
        bounded_upper([0.5], [1.0], confidence)


@given(st.integers(0, 60), st.floats(0.02, 0.98))
def test_showing_a_mean_below_agrees_with_the_bound(num_hits: int, mean: float) -> None:
    values, counts = [0.0, 1.0], [60 - num_hits, num_hits]
    bound = bounded_upper(values, counts, 0.95)
    if abs(bound - mean) > 1e-6:
        assert is_mean_shown_below(values, counts, mean, 0.95) is bool(bound < mean)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_that_a_mean_is_below_one_is_never_shown(confidence: float) -> None:
    """The bound of outcomes that cannot be above 1 says nothing there, however many there are."""
    assert not is_mean_shown_below([0.0], [10_000], 1.0, confidence)


def test_few_large_rows_leave_three_degrees_of_freedom_and_no_fewer() -> None:
    rows = np.array([0.0] * 39 + [40.0])
    found = skewed_interval(rows, 0.95)
    assert found.value - found.low == pytest.approx(t.ppf(0.975, 3) * rows.std(ddof=1) / np.sqrt(40), rel=0.05)


@pytest.mark.parametrize(
    ("values", "counts", "confidence", "bound"),
    [
        ([0.0], [100], 0.95, 0.051851312930),
        ([0.0, 1.0], [95, 5], 0.95, 0.150959220607),
        ([0.0, 0.5, 1.0], [500, 50, 10], 0.99, 0.098016580492),
    ],
)
def test_a_bound_does_not_move_between_versions(
    values: list[float], counts: list[float], confidence: float, bound: float
) -> None:
    """What a certificate says can be had again from its rows."""
    assert bounded_upper(values, counts, confidence) == pytest.approx(bound, abs=1e-9)
