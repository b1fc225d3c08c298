"""Makes a logged decision again: from the facts its row holds, by a policy of today or of then."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from gateway.api.routing_preferences import overrides_of
from gateway.errors import UnknownModel
from gateway.models.catalog import Catalog
from gateway.store.records import RequestRecord
from policies.errors import PolicyError
from policies.ladder import Ladder
from policies.policy import Policy
from policies.routing_decision import decide
from policies.types import ReasonCode, RequestFacts, RoutingDecision, TierEstimate

# What a row does not hold, so that a replay cannot rest on it.
NOT_LOGGED = "which tiers were down or slow, and where the conversation stood"


# Why the router itself chose; a row with such a reason and no estimates was not allowed to keep them.
_BY_ESTIMATES = frozenset(
    {
        ReasonCode.SUFFICIENT,
        ReasonCode.BENEFIT,
        ReasonCode.NONE_SUFFICES,
        ReasonCode.NOVEL,
        ReasonCode.QUARANTINED,
    }
)


def has_its_estimates(record: RequestRecord) -> bool:
    """Whether the row holds what its decision rested on; without it nothing can be said of another decision."""
    return bool(record.sufficiency) or record.reason not in _BY_ESTIMATES


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """Holds a decision made again: what would be served without the dice, and the chances with them."""

    decision: RoutingDecision
    propensities: dict[int, float]


def facts_of(record: RequestRecord, catalog: Catalog) -> RequestFacts:
    """Return what the row knows of the request. The model asked for counts as an override where it names a tier."""
    said = overrides_of(record.overrides)
    tier = said.tier
    if tier is None and record.reason == ReasonCode.PINNED:
        tier = record.decided_tier
    elif tier is None:
        tier = _tier_named(record.model_requested, catalog)
    return RequestFacts(
        num_prompt_tokens=record.prompt_tokens // max(1, record.num_choices),
        max_tokens=None,
        estimates=tuple(TierEstimate(each.tier, each.p_right, each.p_as_good) for each in record.sufficiency),
        overrides=replace(said, tier=tier, session_id=record.session_id),
        kill_switch=record.reason == ReasonCode.KILL_SWITCH,
        novelty=record.novelty or 0.0,
        num_answers=max(1, record.num_choices),
    )


def replay(facts: RequestFacts, policy: Policy, ladder: Ladder) -> ReplayedDecision:
    """Decide again.

    Raises
    ------
    PolicyError
        Policy and request leave no tier.
    """
    drawn = decide(facts, policy, ladder, _NeverExplores())
    return ReplayedDecision(drawn, dict(drawn.propensities))


def replay_view(record: RequestRecord, catalog: Catalog, policy: Policy) -> dict[str, Any]:
    """Show the decision that a policy makes of a logged request, beside the one that was made."""
    try:
        again = replay(facts_of(record, catalog), policy, catalog.ladder)
    except PolicyError as error:
        return {"policy": policy.name, "version": policy.version, "error": str(error), "differs": True}
    decision = again.decision
    # An explored tier was drawn, not chosen: what would have been chosen is the likeliest.
    chosen = _likeliest(record)
    return {
        "policy": policy.name,
        "version": policy.version,
        "tier": decision.tier,
        "reason": decision.reason.value,
        "detail": decision.detail,
        "confidence": decision.confidence,
        "propensities": {str(tier): chance for tier, chance in again.propensities.items()},
        "differs": chosen is not None and decision.tier != chosen,
    }


def _likeliest(record: RequestRecord) -> int | None:
    if record.explored and record.propensities:
        return max(record.propensities, key=lambda tier: record.propensities[tier])
    return record.decided_tier


def _tier_named(model: str, catalog: Catalog) -> int | None:
    try:
        target = catalog.resolve(model)
    except UnknownModel:
        return None
    return target.tier.index if target.tier is not None else None


class _NeverExplores(random.Random):
    """The largest number below 1: no share of exploration is ever drawn, and the chances are as they are."""

    def random(self) -> float:
        return 1.0 - 2.0**-53
