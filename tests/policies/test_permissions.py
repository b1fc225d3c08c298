"""What a key permits: no part of any decision is beyond it (security review M9)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from policies.errors import PolicyError, TierNotPermitted
from policies.policy import Policy
from policies.routing_decision import decide
from policies.types import EVERYTHING, BarReason, Overrides, Permissions, RequestFacts
from tests.policies.strategies import LADDER, PLACED, REGIONS, decisions, estimates, facts, ladders, policies
from tests.policies.test_limits import Made, paths

names = st.lists(st.sampled_from([tier.name for tier in LADDER] + ["gone"]), min_size=1, unique=True).map(tuple)
places = st.lists(st.sampled_from((*REGIONS, "gone")), min_size=1, unique=True).map(tuple)
bounds = st.builds(Permissions, allowed_tiers=st.just(()) | names, allowed_regions=st.just(()) | places)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
@given(decisions(), bounds, st.integers())
def test_no_part_of_a_decision_is_beyond_the_key(made: Made, permissions: Permissions, seed: int) -> None:
    """Choice, exploration, fallback and escalation alike."""
    asked, policy, ladder, _ = made
    bound = structs.replace(asked, overrides=replace(asked.overrides, permissions=permissions))
    permitted = {tier.index for tier in ladder if permissions.permits(tier)}
    try:
        decision = decide(bound, policy, ladder, random.Random(seed))
    except PolicyError:
        assert permitted != set(range(1, 5)), "only what the key bars can leave less than there was"
        return
    reached = {tier for path in paths(decision, policy.escalation.max_escalations) for tier in path}
    assert reached | set(decision.propensities) <= permitted
    assert {tier for tier, why in decision.barred.items() if why is BarReason.KEY} <= set(range(1, 5)) - permitted
    assert set(decision.barred) >= set(range(1, 5)) - permitted


@given(facts, policies, ladders())
def test_permissions_that_bar_nothing_change_nothing(asked: RequestFacts, policy: Policy, ladder: object) -> None:
    placed = tuple(replace(tier, region=tier.region or "eu") for tier in ladder)  # type: ignore[attr-defined]
    every = Permissions(allowed_tiers=tuple(tier.name for tier in placed), allowed_regions=REGIONS)

    def outcome(permissions: Permissions) -> object:
        bound = structs.replace(asked, overrides=replace(asked.overrides, permissions=permissions))
        try:
            return decide(bound, policy, placed, random.Random(1))
        except PolicyError as error:
            return f"{type(error).__name__}: {error}"

    assert outcome(every) == outcome(EVERYTHING)


@given(st.lists(st.sampled_from("abc"), unique=True).map(tuple), st.sampled_from("abcd"))
def test_a_key_without_a_list_may_use_any_policy_and_with_one_those_alone(allowed: tuple[str, ...], name: str) -> None:
    assert Permissions(allowed_policies=allowed).permits_policy(name) is (allowed == () or name in allowed)


@pytest.mark.parametrize(
    ("asked", "permissions", "field", "said"),
    [
        ({"tier": 4}, Permissions(allowed_tiers=("tier-1",)), "tier", "may use the tiers tier-1; .* leave tier-4"),
        ({"min_tier": 2}, Permissions(allowed_tiers=("tier-1",)), "min_tier", "leave tier-2, tier-3, tier-4"),
        ({"max_tier": 1}, Permissions(allowed_tiers=("tier-3",)), "max_tier", "leave tier-1"),
        ({"regions": ("us",)}, Permissions(allowed_regions=("eu",)), "regions", "the tiers tier-1, tier-3"),
        ({}, Permissions(allowed_tiers=("gone",)), "policy", "none of the tiers"),
        ({}, Permissions(("p",), ("tier-1",), ("us",)), "policy", "none of the tiers"),
    ],
)
def test_a_request_beyond_its_key_is_told(
    asked: dict[str, object], permissions: Permissions, field: str, said: str
) -> None:
    overrides = Overrides(**asked, permissions=permissions)  # type: ignore[arg-type]
    request = RequestFacts(20, 50, estimates((0.5, 0.97, 0.98, 0.99)), overrides=overrides)
    with pytest.raises(TierNotPermitted, match=said) as caught:
        decide(request, Policy(), PLACED, random.Random(0))
    assert caught.value.fields[0] == field
