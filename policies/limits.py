"""Filters the tiers a request may use: by policy, key and its own limits, cost, context length, and what is up now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from policies.errors import (
    BeyondCost,
    ConflictingLimits,
    NoTierAvailable,
    NoTierFits,
    OutsideRegions,
    TierNotPermitted,
    UnknownTier,
)
from policies.ladder import Ladder, is_in_regions
from policies.policy import Policy
from policies.pricing import expected_bill_usd
from policies.types import EVERYTHING, BarReason, Overrides, RequestFacts, Tier

_NONE_BARRED: Mapping[int, BarReason] = {}


def permitted_tiers(overrides: Overrides, policy: Policy, ladder: Ladder) -> Ladder:
    """Return the tiers that the policy, the request and the caller's key permit, in the ladder's order.

    Raises
    ------
    UnknownTier
        The request names a tier the ladder does not have.
    ConflictingLimits
        Nothing is left; names the fields that exclude each other.
    OutsideRegions
        What else is left is in no region that policy and request permit.
    TierNotPermitted
        What is left after that is none of the key's.
    """
    permitted = _numbered_tiers(overrides, policy, ladder)
    if policy.allowed_regions or overrides.regions:
        permitted = _in_regions(permitted, overrides, policy)
    # Nearly every key permits everything, and then there is nothing to look through.
    return permitted if overrides.permissions is EVERYTHING else _of_the_key(permitted, overrides, policy, ladder)


def affordable_tiers(facts: RequestFacts, policy: Policy, permitted: Ladder) -> Ladder:
    """Return the tiers at which the request is expected to cost no more than policy and request permit.

    Raises
    ------
    BeyondCost
        None is; says what the cheapest of them would cost.
    """
    limit_usd = cost_limit_usd(facts.overrides, policy)
    if limit_usd is None:
        return permitted
    bills_usd = [expected_bill_usd(tier, facts, policy) for tier in permitted]
    affordable = tuple([tier for tier, bill in zip(permitted, bills_usd, strict=True) if bill <= limit_usd])
    if not affordable:
        tiers = ", ".join(map(str, indexes(permitted)))
        raise BeyondCost(
            f"The request may cost ${limit_usd:f} by policy {policy.name!r} and its own limit; of the permitted tiers "
            f"({tiers}) the cheapest is expected to cost ${min(bills_usd):f}. Lower max_tokens, shorten the prompt, or "
            "raise the limit.",
            fields=_fields(facts.overrides, "max_cost_usd", "tier"),
        )
    return affordable


def cost_limit_usd(overrides: Overrides, policy: Policy) -> Decimal | None:
    """Return the lower of the policy's and the request's limit on what it may be expected to cost; None without any."""
    if overrides.max_cost_usd is None or policy.max_cost_usd is None:
        return policy.max_cost_usd if overrides.max_cost_usd is None else overrides.max_cost_usd
    return min(policy.max_cost_usd, overrides.max_cost_usd)


def barred_tiers(facts: RequestFacts, policy: Policy, ladder: Ladder) -> Mapping[int, BarReason]:
    """Return every tier that a limit on regions or cost, or the key, keeps from the request, and which of them does."""
    limit_usd, permissions = cost_limit_usd(facts.overrides, policy), facts.overrides.permissions
    is_free = limit_usd is None and permissions is EVERYTHING
    if is_free and not policy.allowed_regions and not facts.overrides.regions:
        return _NONE_BARRED
    barred: dict[int, BarReason] = {}
    for tier in ladder:
        if not is_in_regions(tier, policy.allowed_regions, facts.overrides.regions):
            barred[tier.index] = BarReason.REGION
        elif not permissions.permits(tier):
            barred[tier.index] = BarReason.KEY
        elif limit_usd is not None and expected_bill_usd(tier, facts, policy) > limit_usd:
            barred[tier.index] = BarReason.COST
    return barred


def fitting_tiers(facts: RequestFacts, permitted: Ladder) -> Ladder:
    """The tiers whose context takes the prompt and the asked completion; all of them when the length is not known.

    Raises
    ------
    NoTierFits
        None does; carries the numbers.
    """
    if facts.num_prompt_tokens is None:
        return permitted
    # Without a limit of its own a request needs room for one token at least.
    needed = facts.num_prompt_tokens + (facts.max_tokens if facts.max_tokens is not None else 1)
    fitting = tuple([tier for tier in permitted if tier.context_length is None or tier.context_length >= needed])
    if not fitting:
        longest = max(tier.context_length for tier in permitted if tier.context_length is not None)
        raise NoTierFits(facts.num_prompt_tokens, facts.max_tokens, longest, is_counted=facts.is_prompt_counted)
    return fitting


def able_tiers(facts: RequestFacts, fitting: Ladder) -> Ladder:
    """Return the tiers whose models have what the request needs.

    Raises
    ------
    NoTierAvailable
        None has.
    """
    if not facts.unable:
        return fitting
    able = tuple([tier for tier in fitting if tier.index not in facts.unable])
    if not able:
        raise NoTierAvailable(tier.index for tier in fitting)
    return able


def available_tiers(facts: RequestFacts, able: Ladder) -> Ladder:
    """Return the tiers that can take the request now.

    Raises
    ------
    NoTierAvailable
        All of them are down or full.
    """
    if not facts.unavailable:
        return able
    available = tuple([tier for tier in able if tier.index not in facts.unavailable])
    if not available:
        raise NoTierAvailable(tier.index for tier in able)
    return available


def prompt_tiers(facts: RequestFacts, policy: Policy, available: Ladder) -> Ladder:
    """The tiers expected to start within the policy's ``max_wait_s``; when none is, the one expected to start first."""
    limit_s = policy.max_wait_s
    if limit_s is None:
        return available
    waits_s = facts.expected_wait_s
    prompt = tuple(tier for tier in available if waits_s.get(tier.index, 0.0) <= limit_s)
    return prompt or (min(available, key=lambda tier: waits_s.get(tier.index, 0.0)),)


def indexes(tiers: Sequence[Tier]) -> tuple[int, ...]:
    """Return the numbers of some tiers."""
    return tuple([tier.index for tier in tiers])


def _check_known(overrides: Overrides, ladder: Ladder) -> None:
    known = indexes(ladder)
    for name in ("tier", "min_tier", "max_tier"):
        asked = getattr(overrides, name)
        if asked is not None and asked not in known:
            raise UnknownTier(name, asked, known)


def _numbered_tiers(overrides: Overrides, policy: Policy, ladder: Ladder) -> Ladder:
    """Return the tiers whose numbers both permit, wherever they are."""
    if overrides.tier is overrides.min_tier is overrides.max_tier is None and not policy.allowed_tiers:
        return ladder
    _check_known(overrides, ladder)
    low = overrides.min_tier if overrides.min_tier is not None else ladder[0].index
    high = overrides.max_tier if overrides.max_tier is not None else ladder[-1].index
    if low > high:
        raise ConflictingLimits(f"min_tier {low} is above max_tier {high}.", fields=("min_tier", "max_tier"))
    if overrides.tier is not None and not low <= overrides.tier <= high:
        bound = "min_tier" if overrides.tier < low else "max_tier"
        limit = low if bound == "min_tier" else high
        raise ConflictingLimits(f"tier {overrides.tier} contradicts {bound} {limit}.", fields=("tier", bound))
    permitted = tuple(
        tier
        for tier in ladder
        if low <= tier.index <= high
        and (not policy.allowed_tiers or tier.index in policy.allowed_tiers)
        and overrides.tier in (None, tier.index)
    )
    if not permitted:
        asked = [name for name in ("tier", "min_tier", "max_tier") if getattr(overrides, name) is not None]
        raise ConflictingLimits(
            f"Policy {policy.name!r} allows the tiers {', '.join(map(str, sorted(policy.allowed_tiers)))}; "
            f"{' and '.join(f'{name} {getattr(overrides, name)}' for name in asked)} leaves none of them.",
            fields=(*asked, "policy"),
        )
    return permitted


def _in_regions(numbered: Ladder, overrides: Overrides, policy: Policy) -> Ladder:
    permitted = tuple([tier for tier in numbered if is_in_regions(tier, policy.allowed_regions, overrides.regions)])
    if not permitted:
        raise OutsideRegions(_where(numbered, overrides, policy), fields=_fields(overrides, "regions", "tier"))
    return permitted


def _of_the_key(left: Ladder, overrides: Overrides, policy: Policy, ladder: Ladder) -> Ladder:
    permitted = tuple([tier for tier in left if overrides.permissions.permits(tier)])
    if not permitted:
        own = ", ".join(tier.name for tier in ladder if overrides.permissions.permits(tier))
        raise TierNotPermitted(
            f"The API key may use {f'the tiers {own}' if own else 'none of the tiers'}; policy {policy.name!r} and the "
            f"request leave {', '.join(tier.name for tier in left)}. Ask for another tier or policy, or use another "
            "key.",
            fields=_fields(overrides, "tier", "min_tier", "max_tier", "regions"),
        )
    return permitted


def _where(numbered: Ladder, overrides: Overrides, policy: Policy) -> str:
    """Why none of these tiers is in a permitted region, with all that was stated."""
    places = ", ".join(f"tier {tier.index} is in {tier.region or 'no region'}" for tier in numbered)
    said = [
        f"{whose} allows {', '.join(regions)}"
        for whose, regions in ((f"policy {policy.name!r}", policy.allowed_regions), ("the request", overrides.regions))
        if regions
    ]
    return f"No tier is in a permitted region: {' and '.join(said)}; {places}."


def _fields(overrides: Overrides, *names: str) -> tuple[str, ...]:
    """Return the fields of these that the request itself set, and ``policy``."""
    return (*(name for name in names if getattr(overrides, name) not in (None, ())), "policy")
