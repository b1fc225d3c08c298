"""Regions and cost: no decision names a tier beyond them, in any of its parts, and a request that has none is told."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from policies.errors import BeyondCost, InvalidLadder, InvalidPolicy, OutsideRegions, PolicyError
from policies.escalation import Escalation, EscalationMode, EscalationVerdict, escalation_flow
from policies.fallback import FallbackOutcome, fallback_flow
from policies.ladder import check_ladder
from policies.policy import FallbackMode, Policy
from policies.pricing import expected_bill_usd
from policies.routing_decision import decide
from policies.sampling import SampledAnswer, Sampling, inclusion_probabilities
from policies.types import BarReason, Overrides, RequestFacts, RoutingDecision, Tier
from tests.policies.strategies import LADDER, PLACED, decisions, estimates, facts, ladders, policies

Made = tuple[RequestFacts, Policy, tuple[Tier, ...], RoutingDecision]

EU = Policy(exploration_share=0.0, allowed_regions=("eu",))


def request(**overrides: object) -> RequestFacts:
    asked = Overrides(**overrides)  # type: ignore[arg-type]
    return RequestFacts(20, 50, estimates((0.5, 0.97, 0.98, 0.99)), overrides=asked)


def limits_of(asked: RequestFacts, policy: Policy) -> list[Decimal]:
    return [each for each in (policy.max_cost_usd, asked.overrides.max_cost_usd) if each is not None]


def decided(asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...] = PLACED) -> RoutingDecision:
    return decide(asked, policy, ladder, random.Random(0))


def paths(decision: RoutingDecision, max_escalations: int) -> Iterator[tuple[int, ...]]:
    """The tiers asked when every tier fails, and those that answer when every answer is doubted, from each start."""
    yield tuple(asked_by(fallback_flow(decision), FallbackOutcome.FAILED))
    for start in (decision.tier, *decision.ladder, *decision.propensities):
        yield tuple(
            asked_by(escalation_flow(start, decision.escalation_path, max_escalations), EscalationVerdict.DOUBTED)
        )


def asked_by(flow: Generator[Any, Any, Any], ending: FallbackOutcome | EscalationVerdict) -> Iterator[int]:
    """The tiers that a flow asks when each attempt ends alike."""
    attempt = next(flow)
    with suppress(StopIteration):
        while True:
            yield attempt.tier
            attempt = flow.send(ending)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
@given(decisions())
def test_no_part_of_a_decision_is_beyond_regions_or_cost(made: Made) -> None:
    asked, policy, ladder, decision = made
    limits = limits_of(asked, policy)
    for place, path in enumerate(paths(decision, policy.escalation.max_escalations)):
        bills = [expected_bill_usd(ladder[tier - 1], asked, policy) for tier in path]
        for tier in path:
            region = ladder[tier - 1].region
            assert not policy.allowed_regions or region in policy.allowed_regions
            assert not asked.overrides.regions or region in asked.overrides.regions
            assert tier not in decision.barred
        # What fails before its first token costs nothing; what is doubted is paid for together with what replaces it.
        billed = max(bills) if place == 0 else sum(bills)
        assert all(billed <= limit for limit in limits)


@given(facts, policies, ladders())
def test_limits_that_bar_nothing_change_nothing(asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...]) -> None:
    free = replace(policy, allowed_regions=(), max_cost_usd=None)
    unlimited = structs.replace(asked, overrides=replace(asked.overrides, regions=(), max_cost_usd=None))
    here = tuple(replace(tier, region="eu") for tier in ladder)
    wide = replace(free, allowed_regions=("eu", "us"), max_cost_usd=Decimal(10**9))

    def outcome(policy: Policy) -> RoutingDecision | str:
        try:
            return decide(unlimited, policy, here, random.Random(1))
        except PolicyError as error:
            return f"{type(error).__name__}: {error}"

    assert outcome(free) == outcome(wide)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(decisions())
def test_what_is_barred_is_said(made: Made) -> None:
    asked, policy, ladder, decision = made
    for tier in ladder:
        is_outside = any(said and tier.region not in said for said in (policy.allowed_regions, asked.overrides.regions))
        is_dear = any(expected_bill_usd(tier, asked, policy) > limit for limit in limits_of(asked, policy))
        assert decision.barred.get(tier.index) == (
            BarReason.REGION if is_outside else BarReason.COST if is_dear else None
        )


def test_the_safe_choice_stays_in_its_region() -> None:
    unknown = structs.replace(request(), estimates=())
    assert decided(unknown, EU).tier == 3
    assert decided(structs.replace(request(), kill_switch=True), EU).tier == 3
    assert decided(request(), replace(EU, fallback=FallbackMode.ANY)).ladder == (1,)
    assert decided(request(), EU).barred == {2: BarReason.REGION, 4: BarReason.REGION}


def test_a_request_narrows_and_never_widens() -> None:
    both = replace(EU, allowed_regions=("eu", "us"))
    assert decided(request(regions=("us",)), both).tier == 2
    assert decided(request(regions=("eu", "us")), EU).barred.keys() == {2, 4}
    with pytest.raises(OutsideRegions, match="policy 'default' allows eu and the request allows us") as caught:
        decided(request(regions=("us",)), EU)
    assert caught.value.fields == ("regions", "policy")


@pytest.mark.parametrize("pin", [{"tier": 4}, {"min_tier": 4}])
def test_a_pin_outside_is_refused_and_not_moved(pin: dict[str, int]) -> None:
    with pytest.raises(OutsideRegions, match="tier 4 is in us"):
        decided(request(**pin), EU)


def test_a_tier_without_a_region_is_in_none() -> None:
    nowhere = (*PLACED[:3], replace(PLACED[3], region=None))
    assert decided(structs.replace(request(), estimates=()), EU, nowhere).barred[4] is BarReason.REGION
    with pytest.raises(OutsideRegions, match="tier 4 is in no region"):
        decided(request(tier=4), EU, nowhere)


def test_cost_limits_by_policy_and_request() -> None:
    policy = Policy(exploration_share=0.0, max_cost_usd=Decimal("0.004"))
    doubtful = structs.replace(request(), estimates=())
    assert decided(doubtful, policy).tier == 3
    assert decided(structs.replace(doubtful, num_answers=2), policy).tier == 2, "two answers cost twice"
    lower = structs.replace(doubtful, overrides=Overrides(max_cost_usd=Decimal("0.0005")))
    assert decided(lower, policy).tier == 2
    with pytest.raises(BeyondCost, match=r"may cost \$0\.004 .* expected to cost \$0\.01") as caught:
        decided(request(tier=4), policy)
    assert caught.value.fields == ("tier", "policy")
    with pytest.raises(BeyondCost, match=r"\(1, 2, 3, 4\) the cheapest is expected to cost \$0\.0001"):
        decided(request(max_cost_usd=Decimal(0)), policy)


def test_a_prompt_without_a_count_is_priced_by_its_guess() -> None:
    dear = tuple(replace(tier, price_per_input_token_usd=Decimal("0.000001")) for tier in LADDER)
    unknown = structs.replace(request(), num_prompt_tokens=None, estimates=(), guessed_prompt_tokens=1000)
    assert decided(unknown, Policy(exploration_share=0.0, max_cost_usd=Decimal("0.0039")), dear).tier == 2


def test_both_answers_of_a_way_up_are_paid_for() -> None:
    policy = Policy(escalation=Escalation(EscalationMode.NEXT, max_escalations=3), max_cost_usd=Decimal("0.0035"))
    assert [(each.tier, each.target) for each in decided(request(), policy).escalation_path] == [(1, 2)]
    policy = replace(policy, max_cost_usd=Decimal("0.0036"))
    assert [(each.tier, each.target) for each in decided(request(), policy).escalation_path] == [(1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("changes", "field_name"),
    [
        ({"allowed_regions": ("eu", "eu")}, "allowed_regions"),
        ({"allowed_regions": ("",)}, "allowed_regions"),
        ({"allowed_regions": ("eu us",)}, "allowed_regions"),
        ({"max_cost_usd": Decimal("-1")}, "max_cost_usd"),
        ({"budget_usd_per_day": Decimal("NaN")}, "budget_usd_per_day"),
    ],
)
def test_a_policy_whose_limits_cannot_stand_is_refused(changes: dict[str, object], field_name: str) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        Policy(**changes)  # type: ignore[arg-type]
    assert caught.value.field_name == field_name


def test_a_policy_must_leave_a_tier_of_the_ladder() -> None:
    EU.check_against(PLACED)
    with pytest.raises(InvalidPolicy, match=r"\['uk'\]; expected regions of the tiers \(eu, us\)"):
        Policy(allowed_regions=("eu", "uk")).check_against(PLACED)
    with pytest.raises(InvalidPolicy, match="none: no tier has one"):
        EU.check_against(LADDER)
    with pytest.raises(InvalidPolicy, match="a region of one of the allowed tiers"):
        Policy(allowed_tiers=(2, 4), allowed_regions=("eu",)).check_against(PLACED)


def test_a_ladder_says_one_region_for_one_model() -> None:
    shared = (*PLACED[:3], replace(PLACED[3], model=PLACED[2].model))
    with pytest.raises(InvalidLadder, match=r"tier-4\.region is 'us'; expected 'eu' as for the other tier"):
        check_ladder(shared)
    with pytest.raises(InvalidLadder, match="without spaces and commas"):
        check_ladder((replace(PLACED[0], region="eu, us"), *PLACED[1:]))


def test_nothing_is_drawn_against_a_tier_the_prompt_must_not_reach() -> None:
    prices = {1: 0.1, 2: 0.2, 3: 0.3}
    free = inclusion_probabilities(Sampling(), 0.5, SampledAnswer(2, 0.95), prices)
    assert (free.up, free.up_against, [tier for tier, _ in free.down]) == (0.5, 3, [1])
    barred = inclusion_probabilities(Sampling(), 0.5, SampledAnswer(2, 0.95), prices, barred=frozenset({3}))
    assert (barred.up, barred.up_against, barred.logged) == (0.0, 3, 0.0)
    both = inclusion_probabilities(Sampling(), 0.5, SampledAnswer(2, 0.95), prices, barred=frozenset({1, 3}))
    assert both.total == 0.0
