"""Ladders, policies and facts of every shape, for the property tests."""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal

from hypothesis import reject
from hypothesis import strategies as st

from policies.errors import PolicyError
from policies.escalation import Escalation, EscalationMode
from policies.policy import FallbackMode, Policy, StickyMode
from policies.resumption import OnBreak
from policies.routing_decision import decide
from policies.types import (
    Overrides,
    RequestFacts,
    RoutingDecision,
    SessionState,
    ThresholdMode,
    Tier,
    TierEstimate,
)

LADDER = tuple(
    Tier(index=index, name=f"tier-{index}", model=f"model-{index}", price_per_request_usd=Decimal(price))
    for index, price in enumerate(("0.0001", "0.0005", "0.003", "0.01"), start=1)
)
"""The reference ladder's prices."""

PLACED = tuple(replace(tier, region="eu" if tier.index in (1, 3) else "us") for tier in LADDER)
"""The same, in two regions."""

TIERS = tuple(tier.index for tier in LADDER)

shares = st.floats(0, 1)
subsets = st.sets(st.sampled_from(TIERS)).map(lambda tiers: tuple(sorted(tiers)))
prices = st.decimals(0, 1, places=4)
REGIONS = ("eu", "us")
places = st.none() | st.sampled_from(REGIONS)
region_lists = st.just(()) | st.lists(st.sampled_from(REGIONS), min_size=1, unique=True).map(tuple)
cost_limits = st.none() | st.decimals(0, 3, places=3)


def estimates(p_right: tuple[float, ...], p_as_good: tuple[float, ...] | None = None) -> tuple[TierEstimate, ...]:
    """Estimates for tiers 1, 2, … from plain numbers."""
    return tuple(
        TierEstimate(tier, right, as_good)
        for tier, (right, as_good) in enumerate(zip(p_right, p_as_good or p_right, strict=True), start=1)
    )


@st.composite
def ladders(draw: st.DrawFn) -> tuple[Tier, ...]:
    contexts = draw(st.lists(st.none() | st.integers(1, 5000), min_size=4, max_size=4))
    return tuple(
        Tier(
            index=tier.index,
            name=tier.name,
            model=tier.model,
            price_per_request_usd=draw(prices),
            price_per_input_token_usd=draw(prices) / 1000,
            price_per_output_token_usd=draw(prices) / 1000,
            context_length=context,
            region=draw(places),
        )
        for tier, context in zip(LADDER, contexts, strict=True)
    )


policies = st.builds(
    Policy,
    mode=st.sampled_from(ThresholdMode),
    allowed_tiers=subsets,
    allowed_regions=region_lists,
    max_cost_usd=cost_limits,
    quality_floor=shares,
    thresholds=st.dictionaries(st.sampled_from(TIERS), shares),
    quality_value_usd=st.none() | prices,
    exploration_share=shares,
    sampling_share=shares,
    max_novelty=shares,
    sticky=st.sampled_from(StickyMode),
    switch_cost_per_cached_token_usd=prices,
    wait_cost_per_s_usd=prices,
    max_wait_s=st.none() | st.floats(0, 10),
    fallback=st.sampled_from(FallbackMode),
    max_fallbacks=st.integers(0, 5),
    on_break=st.sampled_from(OnBreak),
    escalation=st.builds(Escalation, mode=st.sampled_from(EscalationMode), max_escalations=st.integers(1, 3)),
    expected_output_tokens=st.integers(1, 1000),
)

usable_policies = policies.filter(
    lambda policy: any(policy.permits(tier) and _is_within(policy.max_cost_usd, tier) for tier in PLACED)
)
"""Those that leave a tier of the placed ladder to any request."""


def _is_within(limit_usd: Decimal | None, tier: Tier) -> bool:
    return limit_usd is None or tier.price_per_request_usd <= limit_usd


odd_tiers = st.none() | st.integers(0, 5)

overrides = st.builds(
    Overrides,
    tier=odd_tiers,
    min_tier=odd_tiers,
    max_tier=odd_tiers,
    explore=st.booleans(),
    session_id=st.none(),
    regions=region_lists,
    max_cost_usd=cost_limits,
)

facts = st.builds(
    RequestFacts,
    num_prompt_tokens=st.none() | st.integers(0, 6000),
    max_tokens=st.none() | st.integers(1, 2000),
    estimates=st.lists(
        st.builds(TierEstimate, tier=st.sampled_from(TIERS), p_right=st.floats(), p_as_good=st.floats()), max_size=4
    ).map(tuple)
    | st.tuples(shares, shares, shares, shares).map(estimates),
    overrides=st.just(Overrides()) | overrides,
    session=st.none() | st.builds(SessionState, tier=st.integers(0, 5), cached_tokens=st.integers(0, 10_000)),
    unavailable=st.frozensets(st.sampled_from(TIERS)),
    unable=st.just(frozenset()) | st.frozensets(st.sampled_from(TIERS)),
    expected_wait_s=st.dictionaries(st.sampled_from(TIERS), st.floats(0, 20)),
    kill_switch=st.booleans(),
    novelty=shares,
    quarantine=st.just({}) | st.dictionaries(st.sampled_from(TIERS), st.floats(0, 2)),
    guessed_prompt_tokens=st.integers(0, 6000),
    num_answers=st.integers(1, 4),
)


@st.composite
def decisions(draw: st.DrawFn) -> tuple[RequestFacts, Policy, tuple[Tier, ...], RoutingDecision]:
    """A request that is not refused, and what is decided on it; of those that are drawn three of four are refused."""
    asked, policy, ladder = draw(facts), draw(policies), draw(ladders())
    try:
        return asked, policy, ladder, decide(asked, policy, ladder, random.Random(draw(st.integers())))
    except PolicyError:
        reject()
