"""Policies and ladders that cannot stand are refused with the field named; derived values fill only what is open."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from policies.errors import InvalidLadder, InvalidPolicy
from policies.escalation import Escalation, EscalationMode
from policies.ladder import check_ladder
from policies.policy import FallbackMode, Policy, StickyMode
from policies.sampling import Sampling
from policies.types import ThresholdMode
from tests.policies.strategies import LADDER


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("name", ""),
        ("quality_floor", 1.01),
        ("quality_floor", float("nan")),
        ("confidence", 1.0),
        ("allowed_tiers", (1, 1)),
        ("allowed_tiers", (0,)),
        ("exploration_share", -0.1),
        ("sampling_share", 2),
        ("max_novelty", -1),
        ("quality_value_usd", Decimal(-1)),
        ("quality_value_usd", Decimal("NaN")),
        ("switch_cost_per_cached_token_usd", Decimal("Infinity")),
        ("max_wait_s", float("inf")),
        ("max_fallbacks", -1),
        ("expected_output_tokens", 0),
    ],
)
def test_bad_fields_are_refused_by_name(field_name: str, value: Any) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        Policy(**{field_name: value})
    assert caught.value.field_name == field_name
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    ("field_name", "accepted", "refused"),
    [
        *(
            (name, (0.0, 1.0), (-0.001, 1.001, float("nan")))
            for name in ("quality_floor", "exploration_share", "sampling_share", "max_novelty")
        ),
        *(
            (name, (Decimal(0), Decimal(1000)), (Decimal("-0.001"), Decimal("NaN"), Decimal("Infinity")))
            for name in (
                *("max_cost_usd", "budget_usd_per_day", "quality_value_usd"),
                *("switch_cost_per_cached_token_usd", "wait_cost_per_s_usd"),
            )
        ),
        *((name, ("n", "n" * 64), ("", "n" * 65)) for name in ("name", "version")),
        ("confidence", (0.5, 0.999), (0.499, 1.0, float("nan"))),
        ("allowed_tiers", ((), (1, 2)), ((0, 1), (2, 2))),
        ("max_wait_s", (0.0, 1e9, None), (-0.001, float("inf"))),
        ("max_fallbacks", (0, 100), (-1, 101)),
        ("expected_output_tokens", (1, 10**6), (0,)),
        ("thresholds", ({1: 0.0, 2: 1.0},), ({1: -0.001}, {1: 1.001})),
    ],
)
def test_a_field_takes_its_whole_range_and_nothing_beyond(
    field_name: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in accepted:
        assert getattr(Policy(**{field_name: value}), field_name) == value
    for value in refused:
        with pytest.raises(InvalidPolicy):
            Policy(**{field_name: value})


def test_a_policy_that_says_nothing() -> None:
    """Whoever sets nothing is served by this: a change of it is announced."""
    policy = Policy()
    assert (policy.mode, policy.sticky, policy.fallback) == (ThresholdMode.FLOOR, StickyMode.COST, FallbackMode.UP)
    assert (policy.quality_floor, policy.confidence) == (0.95, 0.95)
    assert (policy.exploration_share, policy.sampling_share) == (0.02, 0.05)
    assert (policy.max_fallbacks, policy.expected_output_tokens) == (3, 256)
    free = (policy.switch_cost_per_cached_token_usd, policy.wait_cost_per_s_usd)
    assert free == (Decimal(0), Decimal(0))
    assert policy.sampling == Sampling({}, (0.9, 0.98), (2.0, 1.0, 0.5), 10.0, 0.01, 0.9)
    escalation = Escalation(EscalationMode.OFF, {}, 1, 0, low_confidence=True, faults=True, hold_calls=False)
    assert policy.escalation == escalation


def test_bad_threshold_is_refused_with_its_tier() -> None:
    with pytest.raises(InvalidPolicy, match=r"thresholds\.2 is 1\.5"):
        Policy(thresholds={2: 1.5})


def test_policy_for_another_ladder_is_refused() -> None:
    Policy(allowed_tiers=(1, 4), thresholds={2: 0.5}).check_against(LADDER)
    for policy in (
        Policy(allowed_tiers=(5,)),
        Policy(thresholds={9: 0.5}),
        Policy(sampling=Sampling(shares={9: 0.5})),
        Policy(escalation=Escalation(least_confidence={9: 0.5})),
    ):
        with pytest.raises(InvalidPolicy, match=r"numbers among \[1, 2, 3, 4\]"):
            policy.check_against(LADDER)


def test_what_is_stated_wins_over_what_is_derived() -> None:
    derived: dict[str, Any] = {"thresholds": {1: 0.7}, "quality_value_usd": Decimal("0.02")}
    filled = Policy().with_derived(**derived)
    assert (filled.threshold(1), filled.threshold(2), filled.quality_value_usd) == (0.7, 0.95, Decimal("0.02"))
    stated = Policy(thresholds={1: 0.9}, quality_value_usd=Decimal(1))
    assert stated.with_derived(**derived) == stated


@pytest.mark.parametrize(
    ("ladder", "field_name"),
    [
        ((), "length"),
        (LADDER[1:], "index"),
        ((*LADDER[:1], replace(LADDER[1], name="tier-1")), "name"),
        ((replace(LADDER[0], price_per_request_usd=Decimal(-1)),), "price_per_request_usd"),
        ((replace(LADDER[0], price_per_output_token_usd=Decimal("NaN")),), "price_per_output_token_usd"),
        ((replace(LADDER[0], context_length=0),), "context_length"),
    ],
)
def test_bad_ladders_are_refused_by_field(ladder: Any, field_name: str) -> None:
    with pytest.raises(InvalidLadder) as caught:
        check_ladder(ladder)
    assert caught.value.field_name == field_name


def test_policies_load_no_model_library() -> None:
    code = (
        "import sys, policies.routing_decision, policies.fallback, policies.sampling; "
        "print([m for m in ('torch', 'numpy', 'sklearn', 'transformers', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
