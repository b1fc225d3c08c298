"""The decision: always among what is permitted, explained, and drawn with the probabilities it states."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from policies.errors import ConflictingLimits, NoTierAvailable, NoTierFits, PolicyError, UnknownTier
from policies.escalation import Escalation, EscalationMode
from policies.policy import Policy, StickyMode
from policies.routing_decision import decide
from policies.turn_lock import TurnLock
from policies.types import (
    Overrides,
    ReasonCode,
    RequestFacts,
    RoutingDecision,
    SessionState,
    ThresholdMode,
    Tier,
)
from tests.policies.strategies import LADDER, TIERS, estimates, facts, ladders, policies, shares

PLAIN = Policy(exploration_share=0.0)
WORTH = replace(PLAIN, mode=ThresholdMode.BENEFIT, quality_value_usd=Decimal("0.02"))


def request(**changes: object) -> RequestFacts:
    base = RequestFacts(num_prompt_tokens=20, max_tokens=50, estimates=estimates((0.5, 0.97, 0.98, 0.99)))
    return structs.replace(base, **changes)  # type: ignore[arg-type]


def decided(asked: RequestFacts, policy: Policy = PLAIN, ladder: tuple[Tier, ...] = LADDER) -> RoutingDecision:
    return decide(asked, policy, ladder, random.Random(0))


@settings(max_examples=300)
@given(facts, policies, ladders(), st.integers())
def test_decision_is_permitted_or_refused_by_type(
    asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...], seed: int
) -> None:
    try:
        decision = decide(asked, policy, ladder, random.Random(seed))
    except PolicyError:
        return
    overrides = asked.overrides
    low, high = overrides.min_tier or 1, overrides.max_tier or 4
    for tier in (decision.tier, *decision.ladder, *decision.propensities):
        assert tier not in asked.unavailable | asked.unable
        assert not policy.allowed_tiers or tier in policy.allowed_tiers
        assert low <= tier <= high
        context = ladder[tier - 1].context_length
        if context is not None and asked.num_prompt_tokens is not None:
            assert asked.num_prompt_tokens + (asked.max_tokens or 1) <= context
    assert overrides.tier in (None, decision.tier)
    assert decision.tier not in decision.ladder
    assert len(set(decision.ladder)) == len(decision.ladder) <= policy.max_fallbacks
    assert math.isclose(math.fsum(decision.propensities.values()), 1.0, abs_tol=1e-12)
    assert decision.propensity == decision.propensities[decision.tier] > 0
    assert decision == decide(asked, policy, ladder, random.Random(seed))


@settings(max_examples=25)
@given(facts, policies, st.floats(0.05, 1))
def test_stated_propensities_are_the_frequencies(asked: RequestFacts, policy: Policy, share: float) -> None:
    # Regions and costs that leave no tier are another test's.
    policy = replace(policy, exploration_share=share, allowed_regions=(), max_cost_usd=None)
    asked = structs.replace(asked, overrides=replace(asked.overrides, regions=(), max_cost_usd=None))
    rng = random.Random(20_261)
    try:
        stated = decide(asked, policy, LADDER, rng).propensities
    except PolicyError:
        assume(False)
    num_draws = 4000
    counts = Counter(decide(asked, policy, LADDER, rng).tier for _ in range(num_draws))
    assert set(counts) <= set(stated)
    for tier, probability in stated.items():
        # Five standard deviations: over all examples a false alarm is rarer than 1 in 10,000.
        margin = 5 * math.sqrt(probability * (1 - probability) / num_draws) + 1e-9
        assert abs(counts[tier] / num_draws - probability) <= margin


@given(facts, policies, st.integers())
def test_nothing_is_explored_that_must_not_be(asked: RequestFacts, policy: Policy, seed: int) -> None:
    policy = replace(policy, exploration_share=1.0)
    for still in (
        structs.replace(asked, overrides=replace(asked.overrides, explore=False)),
        structs.replace(asked, kill_switch=True),
        structs.replace(asked, overrides=replace(asked.overrides, tier=2)),
    ):
        try:
            decision = decide(still, policy, LADDER, random.Random(seed))
        except PolicyError:
            continue
        assert not decision.explored
        assert decision.propensity == 1.0


@given(st.tuples(shares, shares, shares, shares), shares, shares, st.sets(st.sampled_from(TIERS)))
def test_a_higher_floor_never_chooses_a_cheaper_tier(
    p_as_good: tuple[float, ...], floor: float, other: float, allowed: set[int]
) -> None:
    asked = request(estimates=estimates(p_as_good))
    tiers = [
        decided(asked, replace(PLAIN, quality_floor=each, allowed_tiers=tuple(sorted(allowed)))).tier
        for each in sorted((floor, other))
    ]
    assert tiers[0] <= tiers[1]


@given(st.tuples(shares, shares, shares, shares), st.decimals(0, 1, places=6), st.decimals(0, 1, places=6))
def test_dearer_quality_never_chooses_a_worse_tier(p_right: tuple[float, ...], value: Decimal, other: Decimal) -> None:
    asked = request(estimates=estimates(p_right))
    chosen = [
        p_right[decided(asked, replace(WORTH, quality_value_usd=each)).tier - 1] for each in sorted((value, other))
    ]
    assert chosen[0] <= chosen[1] + 1e-9


def test_cheapest_sufficient_tier_by_floor() -> None:
    decision = decided(request())
    assert (decision.tier, decision.reason, decision.confidence) == (2, ReasonCode.SUFFICIENT, 0.97)
    assert decision.ladder == (3, 4)
    assert "tier 1 0.500/0.950" in decision.detail


def test_top_tier_when_none_suffices() -> None:
    decision = decided(request(estimates=estimates((0.1, 0.2, 0.3, 0.4))))
    assert (decision.tier, decision.reason) == (4, ReasonCode.NONE_SUFFICES)


def test_likeliest_tier_when_none_suffices_and_the_top_is_not_allowed() -> None:
    policy = replace(PLAIN, allowed_tiers=(1, 2, 3))
    assert decided(request(estimates=estimates((0.1, 0.3, 0.2, 0.4))), policy).tier == 2


def test_threshold_of_a_tier_wins_over_the_floor() -> None:
    assert decided(request(), replace(PLAIN, thresholds={1: 0.4})).tier == 1


def test_benefit_must_earn_its_price() -> None:
    # Tier 4 costs 0.0095 more than tier 2 and is worth 0.02 times the difference in P(right).
    assert decided(request(estimates=estimates((0.2, 0.5, 0.5, 0.95))), WORTH).tier == 2
    assert decided(request(estimates=estimates((0.2, 0.5, 0.5, 0.99))), WORTH).tier == 4


def test_benefit_may_be_greatest_at_a_cheaper_tier() -> None:
    decision = decided(request(estimates=estimates((0.9, 0.6, 0.7, 0.8))), WORTH)
    assert (decision.tier, decision.reason) == (1, ReasonCode.BENEFIT)


@pytest.mark.parametrize(
    ("asked", "policy", "reason"),
    [
        (request(estimates=()), PLAIN, ReasonCode.NO_ESTIMATE),
        (request(estimates=estimates((math.nan,) * 4)), PLAIN, ReasonCode.NO_ESTIMATE),
        (request(), replace(WORTH, quality_value_usd=None), ReasonCode.NO_ESTIMATE),
        (request(novelty=0.9), replace(PLAIN, max_novelty=0.8), ReasonCode.NOVEL),
        (request(kill_switch=True), PLAIN, ReasonCode.KILL_SWITCH),
    ],
)
def test_what_cannot_be_judged_goes_to_the_top(asked: RequestFacts, policy: Policy, reason: ReasonCode) -> None:
    decision = decided(asked, policy)
    assert (decision.tier, decision.reason) == (4, reason)
    allowed = decided(asked, replace(policy, allowed_tiers=(1, 3)))
    assert (allowed.tier, allowed.reason) == (3, reason)


def test_pinned_tier_has_no_fallback() -> None:
    decision = decided(request(overrides=Overrides(tier=1)), replace(PLAIN, exploration_share=1.0))
    assert (decision.tier, decision.reason, decision.ladder) == (1, ReasonCode.PINNED, ())


def test_only_allowed_tier() -> None:
    assert decided(request(), replace(PLAIN, allowed_tiers=(3,))).reason is ReasonCode.ONLY_ALLOWED
    assert decided(request(overrides=Overrides(min_tier=4))).reason is ReasonCode.ONLY_ALLOWED


def test_context_and_load_are_named_only_when_they_change_the_choice() -> None:
    short = tuple(replace(tier, context_length=64 if tier.index <= 2 else 4096) for tier in LADDER)
    decision = decided(request(), ladder=short)
    assert (decision.tier, decision.reason) == (3, ReasonCode.CONTEXT)
    assert "tier 2 is too short for 20 prompt tokens" in decision.detail
    assert decided(request(unavailable=frozenset({2}))).reason is ReasonCode.OVERLOAD
    assert decided(request(unavailable=frozenset({3}))).reason is ReasonCode.SUFFICIENT


def test_long_waits_move_the_request_but_never_leave_it_without_a_tier() -> None:
    policy = replace(PLAIN, max_wait_s=1.0)
    assert decided(request(expected_wait_s={2: 3.0}), policy).tier == 3
    everywhere = request(expected_wait_s={1: 9.0, 2: 8.0, 3: 7.0, 4: 8.0})
    assert decided(everywhere, policy).tier == 3


def test_waiting_has_a_price() -> None:
    policy = replace(PLAIN, wait_cost_per_s_usd=Decimal("0.001"))
    assert decided(request(expected_wait_s={2: 5.0}), policy).tier == 3


@pytest.mark.parametrize("mode", ThresholdMode)
def test_a_conversation_leaves_its_tier_when_that_is_worth_its_cache(mode: ThresholdMode) -> None:
    policy = replace(WORTH, mode=mode, switch_cost_per_cached_token_usd=Decimal("0.000001"))
    asked = request(estimates=estimates((0.5, 0.97, 0.971, 0.972)))
    assert decided(asked, policy).tier == 2
    few, many = (structs.replace(asked, session=SessionState(tier=3, cached_tokens=count)) for count in (100, 5000))
    assert decided(few, policy).tier == 2
    decision = decided(many, policy)
    assert (decision.tier, decision.reason) == (3, ReasonCode.STICKY)
    assert decided(many, replace(policy, sticky=StickyMode.OFF)).tier == 2


def test_a_cache_at_a_tier_that_is_gone_is_worth_nothing() -> None:
    policy = replace(WORTH, switch_cost_per_cached_token_usd=Decimal("0.000001"))
    asked = request(estimates=estimates((0.5, 0.97, 0.971, 0.972)))
    left = structs.replace(asked, session=SessionState(tier=9, cached_tokens=5000))
    assert decided(left, policy).tier == decided(asked, policy).tier


def test_quality_wins_over_the_cache_of_an_insufficient_tier() -> None:
    policy = replace(PLAIN, switch_cost_per_cached_token_usd=Decimal(1))
    assert decided(request(session=SessionState(tier=1, cached_tokens=1000)), policy).tier == 2


@pytest.mark.parametrize("name", ["p_right", "p_as_good"])
@pytest.mark.parametrize("value", [math.nan, -0.01, 1.01])
def test_an_estimate_that_is_no_probability_is_none(name: str, value: float) -> None:
    """One of the two is enough: what a router gets wrong there it may get wrong in the other."""
    first, *others = estimates((0.99, 0.97, 0.98, 0.99))
    asked = request(estimates=(first, *others))
    assert decided(asked).tier == 1
    broken = structs.replace(asked, estimates=(structs.replace(first, **{name: value}), *others))
    assert decided(broken) == decided(structs.replace(asked, estimates=tuple(others)))
    assert decided(broken).tier == 2


def test_a_conversation_that_must_stay_stays_while_it_can() -> None:
    policy = replace(PLAIN, sticky=StickyMode.ALWAYS, exploration_share=1.0)
    asked = request(session=SessionState(tier=1, cached_tokens=0))
    assert (decided(asked, policy).tier, decided(asked, policy).reason) == (1, ReasonCode.STICKY)
    assert decided(structs.replace(asked, unavailable=frozenset({1})), policy).tier != 1


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (Overrides(min_tier=3, max_tier=2), ("min_tier", "max_tier")),
        (Overrides(tier=1, min_tier=2), ("tier", "min_tier")),
        (Overrides(tier=4, max_tier=3), ("tier", "max_tier")),
        (Overrides(tier=3), ("tier", "policy")),
        (Overrides(min_tier=3), ("min_tier", "policy")),
    ],
)
def test_conflicts_name_the_fields(overrides: Overrides, fields: tuple[str, ...]) -> None:
    with pytest.raises(ConflictingLimits) as caught:
        decided(request(overrides=overrides), replace(PLAIN, allowed_tiers=(1, 2)))
    assert caught.value.fields == fields


def test_refusals_carry_their_numbers() -> None:
    with pytest.raises(UnknownTier, match="min_tier is 7; expected one of 1, 2, 3, 4"):
        decided(request(overrides=Overrides(min_tier=7)))
    short = tuple(replace(tier, context_length=60) for tier in LADDER)
    with pytest.raises(NoTierFits, match=r"length is 60 tokens\. .* resulted in 20 tokens and 50 tokens of completion"):
        decided(request(), ladder=short)
    with pytest.raises(NoTierAvailable, match="1, 2, 3, 4"):
        decided(request(unavailable=frozenset(TIERS)))


LOCK = TurnLock(2, "r-1", 0.4)


def test_a_step_of_a_turn_stays_where_it_began_and_nothing_is_drawn() -> None:
    policy = Policy(exploration_share=1.0, sticky=StickyMode.OFF)
    decision = decide(request(lock=LOCK), policy, LADDER, _NeverAsked())
    assert (decision.tier, decision.reason, decision.propensity) == (2, ReasonCode.LOCKED, 1.0)
    assert decision.propensities == {2: 1.0}
    assert decision.confidence == 0.4
    assert 2 not in decision.ladder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unavailable": frozenset({2})}, ReasonCode.UNLOCKED),
        ({"unable": frozenset({2})}, ReasonCode.UNLOCKED),
        ({"overrides": Overrides(min_tier=3)}, ReasonCode.UNLOCKED),
        ({"overrides": Overrides(tier=1)}, ReasonCode.PINNED),
        ({"kill_switch": True}, ReasonCode.KILL_SWITCH),
    ],
)
def test_only_what_cannot_be_helped_ends_a_turn(changes: dict[str, object], reason: ReasonCode) -> None:
    decision = decide(request(lock=LOCK, **changes), Policy(exploration_share=1.0), LADDER, _NeverAsked())
    assert decision.tier != 2
    assert (decision.reason, decision.propensity) == (reason, 1.0)


def test_a_quarantine_waits_for_the_next_turn() -> None:
    decision = decide(request(lock=LOCK, quarantine={2: 2.0}), Policy(), LADDER, _NeverAsked())
    assert (decision.tier, decision.reason) == (2, ReasonCode.LOCKED)


def test_under_a_lock_a_doubt_sends_nothing_up() -> None:
    policy = Policy(escalation=Escalation(mode=EscalationMode.NEXT, least_confidence={2: 0.9}))
    path = decide(request(lock=LOCK), policy, LADDER, _NeverAsked()).escalation_path
    assert path
    assert {rung.least_confidence for rung in path} == {0.0}


class _NeverAsked:
    def random(self) -> float:
        raise AssertionError("a step is not drawn for")
