"""Derived numbers travel as JSON and fill only what a policy leaves open, for a floor that is not below its own."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from policies.derived_numbers import DERIVED_FLOORS, apply_derived, derive_for_floors
from policies.errors import InvalidPolicy
from policies.labelled_traffic import choose_by_thresholds, choose_by_value, performance
from policies.policy import Policy
from tests.policies.traffic import traffic_of

DERIVED: dict[str, Any] = {
    "confidence": 0.95,
    "max_novelty": 0.9,
    "floors": [
        {"floor": 0.9, "thresholds": {"1": 0.5}, "quality_value_usd": "0.01"},
        {"floor": 0.97, "thresholds": {"1": 0.7}, "quality_value_usd": "0.03"},
        {"floor": 0.99, "thresholds": {"1": 0.8}},
    ],
}


@pytest.mark.parametrize(
    ("floor", "threshold", "value"),
    [(0.5, 0.5, "0.01"), (0.9, 0.5, "0.01"), (0.95, 0.7, "0.03"), (0.97, 0.7, "0.03"), (0.98, 0.8, None)],
)
def test_the_lowest_floor_not_below_is_taken(floor: float, threshold: float, value: str | None) -> None:
    policy = apply_derived(Policy(quality_floor=floor), DERIVED)
    assert policy.threshold(1) == threshold
    assert policy.quality_value_usd == (None if value is None else Decimal(value))
    assert policy.max_novelty == 0.9


@pytest.mark.parametrize("policy", [Policy(quality_floor=0.995), Policy(confidence=0.99)])
def test_more_than_was_shown_is_not_promised(policy: Policy) -> None:
    filled = apply_derived(policy, DERIVED)
    assert filled.thresholds == {}
    assert filled.quality_value_usd is None


def test_what_is_stated_stays() -> None:
    stated = Policy(thresholds={1: 0.1}, quality_value_usd=Decimal(1), max_novelty=0.2)
    assert apply_derived(stated, DERIVED) == stated
    assert apply_derived(stated, {}) == stated


@pytest.mark.parametrize(
    "broken",
    [
        {"floors": [{}], "confidence": 0.95},
        {"floors": 3, "confidence": 0.95},
        {"floors": [{"floor": 0.99}]},
        {"floors": [{"floor": 0.99, "thresholds": {"one": 0.5}}], "confidence": 0.95},
        {"floors": [{"floor": 0.99, "thresholds": {"1": 1.5}}], "confidence": 0.95},
        {"floors": [{"floor": 0.99, "quality_value_usd": "much"}], "confidence": 0.95},
        {"floors": [{"floor": 0.99, "quality_value_usd": "-1"}], "confidence": 0.95},
        {"max_novelty": "far"},
        [],
    ],
)
def test_malformed_numbers_are_refused(broken: Any) -> None:
    with pytest.raises(InvalidPolicy):
        apply_derived(Policy(), broken)


def test_derived_numbers_hold_with_the_exploration_they_allow_for() -> None:
    derived = json.loads(json.dumps(derive_for_floors(traffic_of(2500, 1), floors=(0.9, 0.95), exploration_share=0.05)))
    fresh = traffic_of(40_000, 2)
    for floor in (0.9, 0.95):
        policy = apply_derived(Policy(quality_floor=floor), derived)
        assert policy.quality_value_usd is not None
        for chosen in (
            choose_by_thresholds(fresh, policy.thresholds),
            choose_by_value(fresh, float(policy.quality_value_usd)),
        ):
            assert performance(fresh, chosen, floor, 0.95, 0.05).quality_vs_top >= floor


def test_a_floor_that_cannot_be_held_has_no_numbers() -> None:
    entry = derive_for_floors(traffic_of(200, 4), floors=(1.0,), confidence=0.99, exploration_share=0.5)["floors"][0]
    assert entry == {"floor": 1.0, "expected": {}}


def test_floors_that_numbers_are_derived_for_rise_and_can_be_held() -> None:
    assert list(DERIVED_FLOORS) == sorted(set(DERIVED_FLOORS))
    assert all(0.0 < floor < 1.0 for floor in DERIVED_FLOORS)
    assert Policy().quality_floor in DERIVED_FLOORS
