"""Numbers derived from a floor hold it on fresh traffic, cost less than any blind mix, and mean what decide does."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.labelled_traffic import (
    LabelledTraffic,
    choose_by_thresholds,
    choose_by_value,
    performance,
)
from policies.policy import Policy
from policies.routing_decision import decide
from policies.thresholds import (
    Requirement,
    candidate_thresholds,
    cost_quality_curve,
    derive_quality_value,
    derive_thresholds,
)
from policies.tier_mixes import best_mix_at_cost
from policies.types import RequestFacts, ThresholdMode
from tests.policies.strategies import LADDER, estimates
from tests.policies.traffic import COSTS_USD, traffic_of


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 0.2))
def test_arrays_choose_as_decide_does(seed: int, threshold: float, value: float) -> None:
    traffic = traffic_of(20, seed)
    thresholds = dict.fromkeys((1, 2, 3), threshold)
    by_floor = Policy(thresholds=thresholds, exploration_share=0.0)
    by_value = Policy(mode=ThresholdMode.BENEFIT, quality_value_usd=Decimal(repr(value)), exploration_share=0.0)
    columns = zip(choose_by_thresholds(traffic, thresholds), choose_by_value(traffic, value), strict=True)
    for row, (floor_column, value_column) in enumerate(columns):
        given_estimates = estimates(tuple(traffic.p_right[row]), tuple(traffic.p_as_good[row]))
        asked = RequestFacts(num_prompt_tokens=10, max_tokens=10, estimates=given_estimates)
        assert decide(asked, by_floor, LADDER, random.Random(0)).tier == floor_column + 1
        assert decide(asked, by_value, LADDER, random.Random(0)).tier == value_column + 1


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.9, 0.97])
def test_derived_numbers_hold_the_floor_on_fresh_traffic_for_less_than_any_mix(floor: float) -> None:
    seen, fresh = traffic_of(4000, 1), traffic_of(40_000, 2)
    value = derive_quality_value(seen, Requirement(floor))
    thresholds = derive_thresholds(seen, Requirement(floor))
    assert value.performance.holds
    assert thresholds.performance.holds
    for chosen in (
        choose_by_value(fresh, float(value.quality_value_usd)),
        choose_by_thresholds(fresh, thresholds.thresholds),
    ):
        found = performance(fresh, chosen, floor, 0.95)
        assert found.quality_vs_top >= floor
        mix = best_mix_at_cost(COSTS_USD.tolist(), fresh.quality.mean(axis=0).tolist(), found.cost_usd / 0.8)
        assert mix is not None
        assert mix.quality < found.quality


def test_a_router_that_knows_nothing_saves_nothing() -> None:
    blind = traffic_of(4000, 3, informative=False)
    derived = derive_quality_value(blind, Requirement(0.97))
    budget = derived.performance.cost_usd + 1e-9
    mix = best_mix_at_cost(COSTS_USD.tolist(), blind.quality.mean(axis=0).tolist(), budget)
    assert mix is not None
    assert mix.quality >= derived.performance.quality - 1e-9


def test_a_floor_out_of_reach_is_said_so() -> None:
    # The top tier is wrong where the router says it is right, and there is no room above it.
    traffic = traffic_of(200, 4)
    upside_down = LabelledTraffic(
        traffic.p_right[:, ::-1].copy(), traffic.p_as_good[:, ::-1].copy(), traffic.quality, traffic.cost_usd
    )
    assert not derive_quality_value(upside_down, Requirement(1.0, 0.99)).performance.holds


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_a_higher_floor_never_costs_less(seed: int, floor: float, other: float) -> None:
    traffic = traffic_of(300, seed)
    low, high = (derive_quality_value(traffic, Requirement(each, 0.9)).performance for each in sorted((floor, other)))
    assert not high.holds or low.cost_usd <= high.cost_usd


def test_the_curve_runs_from_cheapest_to_best() -> None:
    points = [point for _, point in cost_quality_curve(traffic_of(2000, 5))]
    costs = [point.cost_usd for point in points]
    assert costs == sorted(costs)
    assert points[0].shares[0] == pytest.approx(1.0)
    assert points[-1].quality > points[0].quality
    assert all(sum(point.shares) == pytest.approx(1.0) for point in points)


def test_weights_count_requests() -> None:
    traffic = traffic_of(50, 6)
    counts = np.random.default_rng(0).integers(1, 4, size=50)
    weighted = LabelledTraffic(
        traffic.p_right, traffic.p_as_good, traffic.quality, traffic.cost_usd, counts.astype(np.float64)
    )
    repeated = LabelledTraffic(
        *(
            np.repeat(each, counts, axis=0)
            for each in (traffic.p_right, traffic.p_as_good, traffic.quality, traffic.cost_usd)
        )
    )
    chosen = choose_by_value(traffic, 0.01)
    ours = performance(weighted, chosen, 0.9, 0.95)
    theirs = performance(repeated, np.repeat(chosen, counts), 0.9, 0.95)
    assert (ours.cost_usd, ours.quality, ours.margin) == pytest.approx((theirs.cost_usd, theirs.quality, theirs.margin))
    # Weights are not further observations: the bound must be the wider one.
    assert ours.margin_low < theirs.margin_low


def test_performance_by_hand() -> None:
    """Two requests of weights 1 and 3: both tiers are right on the first, on the second only the top is."""
    quality, cost_usd = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 4.0], [1.0, 4.0]])
    traffic = LabelledTraffic(quality, quality, quality, cost_usd, np.array([1.0, 3.0]))
    at_the_foot = np.array([0, 0])
    found = performance(traffic, at_the_foot, 0.5, 0.975)
    assert (found.cost_usd, found.quality, found.quality_vs_top, found.shares) == (1.0, 0.25, 0.25, (1.0, 0.0))
    # Differences of 1/2 and -1/2: -1/4 on the whole, off by 3/4 and 1/4.
    assert found.margin == -0.25
    assert found.margin_low == pytest.approx(-0.25 - 1.96 * np.hypot(0.75 * 0.25, 0.25 * 0.75), abs=1e-5)
    assert not found.holds
    explored = performance(traffic, at_the_foot, 0.5, 0.975, exploration_share=0.5)
    assert explored.shares == (0.75, 0.25)
    assert (explored.cost_usd, explored.quality) == (1.75, 0.25 + 0.75 * 0.25)
    top = performance(traffic, np.array([1, 1]), 1.0, 0.975)
    assert (top.quality_vs_top, top.margin_low, top.holds) == (1.0, 0.0, True)
    nothing = LabelledTraffic(quality, quality, np.zeros((2, 2)), cost_usd)
    assert performance(nothing, at_the_foot, 0.5, 0.975).quality_vs_top == float("inf")


def test_of_equal_worth_the_cheaper_is_chosen_and_of_equal_cost_the_lower() -> None:
    p_right = np.array([[0.5, 0.75, 0.5], [0.5, 0.5, 0.5], [0.5, 0.75, 1.0]])
    cost_usd = np.array([[1.0, 2.0, 1.0], [1.0, 1.0, 1.0], [2.0, 3.0, 4.0]])
    traffic = LabelledTraffic(p_right, p_right, p_right, cost_usd)
    assert choose_by_value(traffic, 4.0).tolist() == [0, 0, 0]
    assert choose_by_value(traffic, 8.0).tolist() == [1, 0, 2]


def test_each_tier_has_a_threshold_of_its_own_however_close_right_and_wrong_lie() -> None:
    """Tier 1 is right where its estimate is 0.5004 and not where it is 0.5002, tier 2 likewise at 0.7."""
    is_right = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    p_as_good = np.array([0.5002, 0.7002, 1.0]) + 0.0002 * is_right * [1.0, 1.0, 0.0]
    traffic = LabelledTraffic(p_as_good, p_as_good, is_right, np.tile([1.0, 2.0, 8.0], (4, 1)))
    assert any(
        0.5002 < each[1] <= 0.50041 and 0.7002 < each[2] <= 0.70041 and set(each) == {1, 2}
        for each in candidate_thresholds(traffic)
    )


@pytest.mark.parametrize("field_name", ["p_right", "p_as_good", "quality", "cost_usd", "weights"])
def test_malformed_traffic_is_refused_by_name(field_name: str) -> None:
    arrays: dict[str, Any] = {name: np.ones((3, 2)) for name in ("p_right", "p_as_good", "quality", "cost_usd")}
    arrays["weights"] = np.ones(3)
    LabelledTraffic(**arrays)
    for bad in (np.full(arrays[field_name].shape, np.nan), np.ones((4,)), np.ones((0, 2))):
        with pytest.raises(ValueError, match=field_name):
            LabelledTraffic(**{**arrays, field_name: bad})


points = st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1)), min_size=1, max_size=5)


@given(points, st.floats(0, 1.2), st.lists(st.floats(0.01, 1), min_size=5, max_size=5))
def test_no_blind_mix_beats_the_best_one(
    tiers: list[tuple[float, float]], budget: float, raw_shares: list[float]
) -> None:
    costs, qualities = [cost for cost, _ in tiers], [quality for _, quality in tiers]
    best = best_mix_at_cost(costs, qualities, budget)
    shares = np.array(raw_shares[: len(tiers)]) / sum(raw_shares[: len(tiers)])
    if shares @ costs > budget:
        return
    assert best is not None
    assert best.cost_usd <= budget + 1e-9
    assert sum(best.shares) == pytest.approx(1.0)
    assert best.quality >= shares @ qualities - 1e-9
