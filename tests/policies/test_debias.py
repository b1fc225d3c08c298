"""Rates read by a judge that errs become true rates again, with intervals that cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.intervals import binomial_upper, bounded_upper
from policies.judge_correction import (
    GoldCounts,
    debiased_rate,
    debiased_upper,
    effective_counts,
    prediction_powered,
    prediction_powered_upper,
    rogan_gladen,
)


def test_a_good_judge_reads_six_percent_as_fifteen() -> None:
    gold = GoldCounts(90, 100, 10, 100)
    assert gold.flag_rate(0.0625) == pytest.approx(0.15)
    assert rogan_gladen(0.15, gold.sensitivity, gold.specificity) == pytest.approx(0.0625)


@given(st.floats(0, 1), st.floats(0.6, 1), st.floats(0.6, 1))
def test_rogan_gladen_undoes_the_judge(rate: float, sensitivity: float, specificity: float) -> None:
    read = rate * sensitivity + (1 - rate) * (1 - specificity)
    assert rogan_gladen(read, sensitivity, specificity) == pytest.approx(rate, abs=1e-9)


def test_a_coin_tells_nothing() -> None:
    assert math.isnan(rogan_gladen(0.5, 0.5, 0.5))
    assert debiased_upper(0.1, GoldCounts(5, 10, 5, 10), 0.95) == 1.0
    assert debiased_upper(0.1, GoldCounts(0, 0, 0, 0), 0.95) == 1.0


@pytest.mark.parametrize(
    "gold",
    [
        GoldCounts(5, 10, 5, 10),
        GoldCounts(0, 0, 5, 10),
        GoldCounts(5, 10, 0, 0),
        # Better than a coin as counted, and not shown to be by so few cases; and the other way round.
        GoldCounts(1, 1, 99, 100),
        GoldCounts(1, 1, 3, 4),
        GoldCounts(0, 1, 1, 100),
    ],
)
def test_a_judge_that_is_not_shown_to_beat_a_coin_corrects_nothing(gold: GoldCounts) -> None:
    found = debiased_rate(10, 100, gold)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0.0, 1.0)


@given(st.integers(0, 60), st.integers(0, 60), *[st.integers(0, 20)] * 4)
def test_a_corrected_rate_is_a_rate_inside_its_interval(
    num_flagged: int, num_more: int, flagged_faults: int, missed: int, flagged_sound: int, passed: int
) -> None:
    gold = GoldCounts(flagged_faults, flagged_faults + missed, flagged_sound, flagged_sound + passed)
    found = debiased_rate(num_flagged, num_flagged + num_more, gold)
    if math.isnan(found.value):
        assert (found.low, found.high) == (0.0, 1.0)
    else:
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0


def test_the_interval_is_lang_and_reiczigels() -> None:
    """Their formula, worked apart from ours."""
    found = debiased_rate(30, 100, GoldCounts(70, 80, 10, 100), 0.9)
    assert (found.low, found.high) == (pytest.approx(0.1464021447, abs=1e-9), pytest.approx(0.3709451180, abs=1e-9))
    assert found.value == pytest.approx(0.2 / 0.775)
    least = debiased_rate(60, 400, GoldCounts(18, 20, 6, 40))
    assert (least.value, least.low, least.high) == (0.0, 0.0, pytest.approx(0.1265759818, abs=1e-9))


def _judged(rng: np.random.Generator, num_rows: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    faults = (rng.random(num_rows) < rate).astype(np.float64)
    right = rng.random(num_rows) < 0.9
    return faults, np.where(right, faults, 1 - faults)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
def test_intervals_cover_and_bounds_bound(rate: float) -> None:
    rng = np.random.default_rng(3)
    inside, widths, above, powered, powered_above = [], [], [], [], []
    for _ in range(200):
        gold_faults, gold_flags = _judged(rng, 200, 0.5)
        gold = GoldCounts(
            int((gold_flags * gold_faults).sum()),
            int(gold_faults.sum()),
            int((gold_flags * (1 - gold_faults)).sum()),
            int((1 - gold_faults).sum()),
        )
        _, flags = _judged(rng, 400, rate)
        found = debiased_rate(flags.sum(), 400, gold)
        inside.append(found.low <= rate <= found.high)
        widths.append(found.high - found.low)
        above.append(debiased_upper(binomial_upper(int(flags.sum()), 400, 0.975), gold, 0.975) >= rate)
        truth, judged = _judged(rng, 150, rate)
        by_gold = prediction_powered(truth, judged, flags)
        powered.append(by_gold.low <= rate <= by_gold.high)
        high = prediction_powered_upper(bounded_upper(flags, np.ones(400), 0.975), truth, judged, 0.975)
        powered_above.append(high >= rate)
    assert np.mean(inside) >= 0.93
    assert np.mean(widths) <= 0.2
    assert np.mean(above) >= 0.95
    # By the central limit theorem, on 150 rows with as few as five faults.
    assert np.mean(powered) >= 0.85
    assert np.mean(powered_above) >= 0.95


def test_judgements_narrow_what_gold_alone_says_and_useless_ones_do_no_harm() -> None:
    rng = np.random.default_rng(4)
    truth, judged = _judged(rng, 300, 0.3)
    _, others = _judged(rng, 6000, 0.3)
    alone = 2 * 1.96 * truth.std(ddof=1) / math.sqrt(300)
    found = prediction_powered(truth, judged, others)
    assert found.high - found.low < 0.8 * alone
    noise = prediction_powered(truth, rng.random(300), rng.random(6000))
    assert noise.high - noise.low < 1.05 * alone


@given(st.integers(1, 50), st.floats(0.1, 10))
def test_equal_weights_count_rows(num_rows: int, weight: float) -> None:
    hits, trials = effective_counts(np.ones(num_rows), np.full(num_rows, weight))
    assert trials == pytest.approx(num_rows)
    assert hits == pytest.approx(num_rows)


def test_unequal_weights_are_worth_fewer_rows() -> None:
    _, trials = effective_counts(np.ones(4), np.array([1.0, 1.0, 1.0, 9.0]))
    assert trials < 2
    assert effective_counts(np.zeros(0), np.zeros(0)) == (0.0, 0.0)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="flagged_sound"):
        GoldCounts(1, 2, 3, 2)
