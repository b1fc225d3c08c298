"""From facts to the way up: how sure each tier must be of its answer, given who would answer in its place."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from policies.escalation import EscalationMode, Rung, targets
from policies.ladder import Ladder
from policies.limits import cost_limit_usd, indexes
from policies.policy import Policy
from policies.pricing import expected_bill_usd, expected_cost_usd
from policies.tier_choice import usable_estimates
from policies.types import RequestFacts, ThresholdMode, Tier


def escalation_path(available: Ladder, facts: RequestFacts, policy: Policy) -> tuple[Rung, ...]:
    """Return where a low-confidence answer of each available tier goes, and below which confidence it does.

    What the policy says of a tier counts. Else, in mode ``benefit``, going up must earn its price: an answer is doubted
    below P(right of the higher tier) less that tier's price in units of ``quality_value_usd``. In mode ``floor`` it is
    doubted below ``quality_floor`` times P(right of the highest tier). Without estimates the floor itself is asked for.

    A request that goes up pays for both answers: under a limit on its cost there is only as much of a way up as the
    limit has room for, for whoever began at its foot.

    Parameters
    ----------
    available : the tiers this request may use now, in the ladder's order
    """
    escalation = policy.escalation
    if escalation.mode is EscalationMode.OFF or facts.kill_switch or facts.overrides.tier is not None:
        return ()
    by_index = {tier.index: tier for tier in available}
    ways = targets(indexes(available), escalation.mode)
    limit_usd = cost_limit_usd(facts.overrides, policy)
    if limit_usd is not None:
        bills_usd = {index: expected_bill_usd(tier, facts, policy) for index, tier in by_index.items()}
        ways = _affordable(ways, bills_usd, limit_usd)
    return tuple(
        Rung(
            tier, target, escalation.least_confidence.get(tier, _least(by_index[target], available[-1], facts, policy))
        )
        for tier, target in ways.items()
    )


def _affordable(ways: Mapping[int, int], bills_usd: Mapping[int, Decimal], limit_usd: Decimal) -> dict[int, int]:
    """Return the ways up that all answers on the dearest path over them can be paid for; ``ways`` rise."""
    spent_usd = dict(bills_usd)
    kept: dict[int, int] = {}
    for tier, target in ways.items():
        together = spent_usd[tier] + bills_usd[target]
        if together <= limit_usd:
            kept[tier], spent_usd[target] = target, together
    return kept


def _least(target: Tier, top: Tier, facts: RequestFacts, policy: Policy) -> float:
    estimates = usable_estimates(facts)
    if policy.mode is ThresholdMode.BENEFIT and policy.quality_value_usd and target.index in estimates:
        price = expected_cost_usd(target, facts, policy) / policy.quality_value_usd
        return max(0.0, estimates[target.index].p_right - float(price))
    if top.index in estimates:
        return policy.quality_floor * estimates[top.index].p_right
    return policy.quality_floor
