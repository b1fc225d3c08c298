"""Which tiers a request may use at all: by policy and by its own limits, by context length, by what is up now."""

from __future__ import annotations

from collections.abc import Sequence

from policies.errors import ConflictingLimits, NoTierAvailable, NoTierFits, UnknownTier
from policies.ladder import Ladder
from policies.policy import Policy
from policies.types import Overrides, RequestFacts, Tier


def permitted_tiers(overrides: Overrides, policy: Policy, ladder: Ladder) -> Ladder:
    """The tiers that both the policy and the request permit, in the ladder's order.

    Raises
    ------
    UnknownTier
        The request names a tier the ladder does not have.
    ConflictingLimits
        Nothing is left; names the fields that exclude each other.
    """
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
        raise NoTierFits(facts.num_prompt_tokens, facts.max_tokens, longest)
    return fitting


def available_tiers(facts: RequestFacts, fitting: Ladder) -> Ladder:
    """The tiers that can take the request now.

    Raises
    ------
    NoTierAvailable
        All of them are down or full.
    """
    available = tuple([tier for tier in fitting if tier.index not in facts.unavailable])
    if not available:
        raise NoTierAvailable(tier.index for tier in fitting)
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
    """The numbers of some tiers."""
    return tuple([tier.index for tier in tiers])


def _check_known(overrides: Overrides, ladder: Ladder) -> None:
    known = indexes(ladder)
    for name in ("tier", "min_tier", "max_tier"):
        asked = getattr(overrides, name)
        if asked is not None and asked not in known:
            raise UnknownTier(name, asked, known)
