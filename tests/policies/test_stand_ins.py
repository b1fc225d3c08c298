"""Outages never lower the floor in silence: who answers is who the policy would choose, or who may stand in for it.

The rule is written down here a second time, plainly, and held against decisions over generated ladders, estimates and
outages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from policies.errors import NoTierAvailable, PolicyError
from policies.fallback import FallbackOutcome, fallback_flow
from policies.policy import FallbackMode, Policy
from policies.routing_decision import decide
from policies.types import Overrides, RequestFacts, RoutingDecision, ThresholdMode, Tier
from tests.policies.strategies import LADDER, TIERS, estimates, facts, ladders, policies

PLAIN = Policy(exploration_share=0.0)
DOWN = FallbackOutcome.UNAVAILABLE
keeping = policies.filter(lambda policy: policy.fallback is not FallbackMode.ANY)


def request(*p_as_good: float, **changes: object) -> RequestFacts:
    base = RequestFacts(num_prompt_tokens=20, max_tokens=50, estimates=estimates(p_as_good))
    return structs.replace(base, **changes)  # type: ignore[arg-type]


def decided(asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...] = LADDER, seed: int = 0) -> RoutingDecision:
    return decide(asked, policy, ladder, random.Random(seed))


def tried(decision: RoutingDecision) -> Iterator[int]:
    """The tiers asked when each is down in turn."""
    flow = fallback_flow(decision)
    attempt = next(flow)
    while True:
        yield attempt.tier
        try:
            attempt = flow.send(DOWN)
        except StopIteration:
            return


def may_answer(tier: int, wanted: int, asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...]) -> bool:
    """The promise in plain words: the wanted tier, the top one, or one that is no worse by estimate or threshold."""
    if tier in (wanted, policy.top(ladder)):
        return True
    if asked.kill_switch:
        return tier > wanted
    found = {
        each.tier: each.p_as_good for each in asked.estimates if 0 <= each.p_right <= 1 and 0 <= each.p_as_good <= 1
    }
    if tier not in found:
        return tier > wanted and tier not in asked.quarantine
    if found[tier] < asked.quarantine.get(tier, 0.0):
        return False
    is_foreign = policy.max_novelty is not None and asked.novelty > policy.max_novelty
    if is_foreign:
        return tier > wanted
    return found[tier] >= policy.threshold(tier) or (
        wanted != policy.top(ladder) and wanted in found and found[tier] >= found[wanted]
    )


@pytest.mark.slow
@settings(max_examples=400)
@given(facts, keeping, ladders(), st.integers())
def test_no_tier_answers_in_an_outage_that_the_policy_would_not_choose(
    asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...], seed: int
) -> None:
    """Nothing is explored here: exploring is the policy's own choice, outage or not."""
    policy = replace(policy, exploration_share=0.0)
    try:
        # Waits are part of the choice where the policy prices them; only its longest wait makes a tier unavailable.
        wanted = decided(structs.replace(asked, unavailable=frozenset()), replace(policy, max_wait_s=None), ladder).tier
        decision = decided(asked, policy, ladder, seed)
    except PolicyError:
        return
    order = list(tried(decision))
    assert all(may_answer(tier, wanted, asked, policy, ladder) for tier in order), (wanted, order)
    if policy.fallback is FallbackMode.UP_ONLY:
        assert min(order) >= wanted
    if policy.fallback is FallbackMode.NONE:
        assert order == [wanted]


@settings(max_examples=200)
@given(facts, keeping, ladders(), st.integers())
def test_an_outage_is_refused_only_where_nobody_may_stand_in(
    asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...], seed: int
) -> None:
    policy = replace(policy, fallback=FallbackMode.UP)
    calm = structs.replace(asked, unavailable=frozenset())
    try:
        wanted = decided(structs.replace(calm, expected_wait_s={}), policy, ladder).tier
    except PolicyError:
        return
    try:
        decided(asked, policy, ladder, seed)
    except NoTierAvailable:
        assert wanted in asked.unavailable
        top = policy.top(ladder)
        assert asked.overrides.tier is not None or top in asked.unavailable or not _may_use(top, calm, policy, ladder)


def _may_use(tier: int, asked: RequestFacts, policy: Policy, ladder: tuple[Tier, ...]) -> bool:
    """Whether the tier could answer at all: in its limits, and long enough."""
    try:
        decided(structs.replace(asked, overrides=replace(asked.overrides, tier=tier)), policy, ladder)
    except PolicyError:
        return False
    return True


@pytest.mark.parametrize("mode", ThresholdMode)
def test_with_the_top_tier_down_only_what_suffices_answers(mode: ThresholdMode) -> None:
    """Four of sixty answers came from tiers below the floor, with 200, while the top tier was down."""
    policy = replace(PLAIN, mode=mode, quality_value_usd=Decimal(1000), quality_floor=0.95)
    hard = request(0.2, 0.5, 0.9, 1.0)
    assert decided(hard, policy).tier == 4
    assert decided(hard, policy).ladder == ()
    with pytest.raises(NoTierAvailable, match="4"):
        decided(structs.replace(hard, unavailable=frozenset({4})), policy)
    near = request(0.2, 0.5, 0.96, 1.0)
    top_only = replace(policy, thresholds={1: 0.95, 2: 0.95, 3: 0.99})
    assert decided(near, top_only).ladder == ()
    assert decided(structs.replace(near, unavailable=frozenset({4})), policy).tier == 3
    assert decided(hard, replace(policy, fallback=FallbackMode.ANY)).ladder == (3, 2, 1)
    assert (
        decided(structs.replace(hard, unavailable=frozenset({4})), replace(policy, fallback=FallbackMode.ANY)).tier < 4
    )


def test_order_goes_up_first_then_down_to_what_suffices() -> None:
    good = request(0.96, 0.97, 0.98, 0.99, overrides=Overrides(min_tier=2))
    assert decided(good, PLAIN).ladder == (3, 4)
    assert decided(request(0.5, 0.97, 0.98, 0.99), PLAIN).ladder == (3, 4)
    best_is_two = replace(PLAIN, thresholds={1: 0.95, 2: 0.9, 3: 0.99})
    assert decided(request(0.94, 0.97, 0.98, 0.99), best_is_two).ladder == (3, 4)
    for mode, ladder in ((FallbackMode.UP, (3, 4)), (FallbackMode.UP_ONLY, (3, 4)), (FallbackMode.NONE, ())):
        assert decided(request(0.5, 0.97, 0.98, 0.99), replace(PLAIN, fallback=mode)).ladder == ladder
    assert decided(request(0.5, 0.97, 0.98, 0.99), replace(PLAIN, fallback=FallbackMode.ANY)).ladder == (3, 4, 1)
    assert decided(request(0.5, 0.97, 0.98, 0.99), replace(PLAIN, max_fallbacks=1)).ladder == (3,)


def test_a_higher_tier_below_its_threshold_is_passed_over() -> None:
    assert decided(request(0.97, 0.4, 0.98, 0.99), PLAIN).ladder == (3, 4)
    assert decided(request(0.97, 0.98, 0.98, 0.99, quarantine={2: 2.0}), PLAIN).ladder == (3, 4)


def test_what_cannot_be_judged_has_no_cheaper_stand_in() -> None:
    sure = request(0.99, 0.99, 0.99, 0.99)
    assert decided(structs.replace(sure, kill_switch=True), PLAIN).ladder == ()
    assert decided(structs.replace(sure, novelty=0.9), replace(PLAIN, max_novelty=0.5)).ladder == ()
    assert decided(request(), PLAIN).ladder == ()
    with pytest.raises(NoTierAvailable):
        decided(request(unavailable=frozenset({4})), PLAIN)


def test_an_explored_tier_that_fails_gives_way_to_what_the_policy_wanted() -> None:
    policy = replace(PLAIN, exploration_share=1.0)
    asked = request(0.2, 0.5, 0.97, 0.99)
    orders = {(found.tier, found.ladder) for seed in range(40) for found in [decided(asked, policy, seed=seed)]}
    assert orders == {(1, (3, 4)), (2, (3, 4)), (3, (4,)), (4, (3,))}


def test_a_slow_tier_is_waited_for_where_no_other_may_stand_in() -> None:
    policy = replace(PLAIN, max_wait_s=1.0)
    waits = dict.fromkeys(TIERS, 0.0) | {4: 9.0}
    assert decided(request(0.2, 0.5, 0.9, 1.0, expected_wait_s=waits), policy).tier == 4
    assert (
        decided(request(0.2, 0.5, 0.9, 1.0, expected_wait_s=waits), replace(policy, fallback=FallbackMode.ANY)).tier
        == 3
    )


def test_a_model_that_lacks_what_is_asked_is_no_outage() -> None:
    asked = request(0.2, 0.5, 0.9, 1.0, unable=frozenset({4}))
    assert decided(asked, PLAIN).tier == 3
