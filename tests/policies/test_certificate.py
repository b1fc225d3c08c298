"""Certificates hold as often as they say, through sampling and through a judge that errs, and admit ignorance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.certificate import CheckedSample, FloorStatus, certify, certify_threshold, loss_lower, loss_upper
from policies.intervals import binomial_lower, binomial_upper
from policies.judge_correction import GoldCounts

GOLD = GoldCounts(360, 400, 40, 400)


def checked_of(losses: list[float], inclusion: float = 1.0, num_requests: int | None = None) -> CheckedSample:
    values = np.array(losses, dtype=np.float64)
    return CheckedSample(values, np.full(len(values), inclusion), len(values) if num_requests is None else num_requests)


def sampled(rng: np.random.Generator, losses: np.ndarray, inclusion: np.ndarray) -> tuple[CheckedSample, np.ndarray]:
    drawn = np.flatnonzero(rng.random(len(losses)) < inclusion)
    return CheckedSample(losses[drawn], inclusion[drawn], len(losses), float(inclusion.min())), drawn


def test_the_three_findings() -> None:
    assert certify(checked_of([1.0] * 13 + [0.0] * 121), 0.85, 0.95).status is FloorStatus.HELD
    assert certify(checked_of([1.0] * 40 + [0.0] * 94), 0.85, 0.95).status is FloorStatus.BROKEN
    assert certify(checked_of([1.0, *[0.0] * 9]), 0.85, 0.95).status is FloorStatus.INSUFFICIENT


def test_nothing_checked_is_insufficient_even_for_a_low_floor() -> None:
    found = certify(checked_of([], num_requests=1000), 0.5, 0.95)
    assert found.status is FloorStatus.INSUFFICIENT
    assert (found.loss_low, found.loss_high) == (0.0, 1.0)


def test_a_larger_sample_certifies_what_a_small_one_cannot() -> None:
    few, many = ([1.0] * k + [0.0] * (19 * k) for k in (2, 40))
    assert certify(checked_of(few, 0.05, 800), 0.9, 0.95).status is FloorStatus.INSUFFICIENT
    assert certify(checked_of(many, 0.05, 16_000), 0.9, 0.95).status is FloorStatus.HELD


def test_weighted_samples_cover_the_true_loss() -> None:
    rng = np.random.default_rng(5)
    p_fault = rng.beta(1, 9, size=4000)
    # The doubtful are checked more often: without weights their losses would count too much.
    inclusion = np.clip(0.05 + p_fault, 0, 0.3)
    high, low, raw = [], [], []
    for _ in range(120):
        losses = (rng.random(4000) < p_fault).astype(np.float64)
        found = certify(sampled(rng, losses, inclusion)[0], 0.9, 0.95)
        high.append(found.loss_high >= p_fault.mean())
        low.append(found.loss_low <= p_fault.mean())
        raw.append(found.loss)
    assert np.mean(high) >= 0.95
    assert np.mean(low) >= 0.95
    assert np.mean(raw) == pytest.approx(p_fault.mean(), abs=0.005)


def flagged(rng: np.random.Generator, faults: np.ndarray) -> np.ndarray:
    return np.where(rng.random(len(faults)) < 0.9, faults, 1 - faults)


@pytest.mark.parametrize("floor", [0.9, 0.95])
def test_thresholds_hold_the_floor_through_a_judge_that_errs(floor: float) -> None:
    """True loss at the chosen threshold is beyond what the floor permits in at most 5 % of samples."""
    rng = np.random.default_rng(6)
    p_as_good = rng.beta(4, 1, size=60_000)
    chosen, broken = [], []
    for _ in range(40):
        rows = rng.integers(0, 60_000, 5000)
        p = p_as_good[rows]
        flags = flagged(rng, (rng.random(5000) > p).astype(np.float64))
        sample, drawn = sampled(rng, flags, np.full(5000, 0.5))
        found = certify_threshold(p[drawn], sample, np.linspace(0, 1, 41).tolist(), floor, 0.95, GOLD)
        threshold = 1.1 if found.threshold is None else found.threshold
        chosen.append(threshold)
        true_loss = float(np.where(p_as_good >= threshold, 1 - p_as_good, 0.0).mean())
        broken.append(true_loss > 1 - floor)
    assert np.mean(broken) <= 0.05
    assert min(chosen) < 0.95  # it does certify something


def test_a_floor_out_of_reach_leaves_no_threshold() -> None:
    found = certify_threshold(np.ones(50), checked_of([1.0] * 50), [0.2, 0.5, 0.9], 0.95, 0.95)
    assert found.threshold is None
    assert found.certificate is None


def test_the_search_ends_at_the_first_threshold_that_fails() -> None:
    p = np.repeat([0.2, 0.6, 0.9], [1000, 1000, 1000])
    losses = np.repeat([0.0, 1.0, 0.0], [1000, 1000, 1000])
    found = certify_threshold(p, CheckedSample(losses, np.ones(3000), 3000), [0.1, 0.5, 0.8], 0.9, 0.95)
    assert found.threshold == 0.8


def test_an_erring_judge_costs_evidence() -> None:
    rng = np.random.default_rng(7)
    faults = (rng.random(3000) < 0.03).astype(np.float64)
    sample = CheckedSample(flagged(rng, faults), np.ones(3000), 3000)
    with_gold, believed = certify(sample, 0.9, 0.95, GOLD), certify(sample, 0.9, 0.95)
    assert believed.status is FloorStatus.BROKEN
    assert with_gold.status is FloorStatus.HELD


@pytest.mark.parametrize(
    ("losses", "inclusion", "num_requests"),
    [
        ([0.5], [0.0], 1),
        ([0.5], [1.5], 1),
        ([2.0], [1.0], 1),
        ([-0.5], [1.0], 1),
        ([0.5], [1.0], 0),
        ([0.5], [1.0, 1.0], 2),
    ],
)
def test_malformed_samples_are_refused(losses: list[float], inclusion: list[float], num_requests: int) -> None:
    with pytest.raises(ValueError, match=r"losses|inclusion|checked"):
        CheckedSample(np.array(losses), np.array(inclusion), num_requests)


def test_a_wrong_least_inclusion_is_refused() -> None:
    with pytest.raises(ValueError, match="least_inclusion"):
        CheckedSample(np.array([0.0]), np.array([0.1]), 5, least_inclusion=0.2)


@pytest.mark.parametrize(("num_lost", "num"), [(0, 50), (3, 50), (50, 50)])
def test_where_every_request_was_checked_the_bounds_are_the_exact_binomial_ones(num_lost: int, num: int) -> None:
    losses = np.array([1.0] * num_lost + [0.0] * (num - num_lost))
    sample = CheckedSample(losses, np.ones(num), num)
    assert loss_upper(sample, 0.95) == binomial_upper(num_lost, num, 0.95)
    assert loss_lower(sample, 0.95) == binomial_lower(num_lost, num, 0.95)
    one_unchecked = CheckedSample(losses, np.ones(num), num + 1)
    assert loss_upper(one_unchecked, 0.95) != binomial_upper(num_lost, num + 1, 0.95)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.05, 1)), max_size=30),
    st.integers(0, 50),
    st.none() | st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_bounds_are_rates_whatever_the_judge_is_worth(
    rows: list[tuple[float, float]], num_unchecked: int, flagged_of_40: tuple[int, int] | None
) -> None:
    losses, inclusion = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    gold = None if flagged_of_40 is None else GoldCounts(flagged_of_40[0], 40, flagged_of_40[1], 40)
    found = certify(CheckedSample(losses, inclusion, len(rows) + num_unchecked), 0.9, 0.95, gold)
    assert 0.0 <= found.loss_low <= 1.0
    assert 0.0 <= found.loss_high <= 1.0
    assert found.quality_low == 1.0 - found.loss_high
    if flagged_of_40 is not None and flagged_of_40[0] <= flagged_of_40[1]:
        assert (found.status, found.loss_high) == (FloorStatus.INSUFFICIENT, 1.0), "no better than a coin"
