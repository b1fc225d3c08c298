"""From facts to the way up: how sure each tier must be of its answer, given who would answer in its place."""

from __future__ import annotations

from policies.choice import usable_estimates
from policies.escalation import EscalationMode, Rung, targets
from policies.ladder import Ladder
from policies.limits import indexes
from policies.policy import Policy
from policies.pricing import expected_cost_usd
from policies.types import RequestFacts, ThresholdMode, Tier


def way_up(available: Ladder, facts: RequestFacts, policy: Policy) -> tuple[Rung, ...]:
    """Where a doubted answer of each available tier goes, and below which confidence it is doubted.

    What the policy says of a tier counts. Else, in mode ``benefit``, going up must earn its price: an answer is doubted
    below P(right of the higher tier) less that tier's price in units of ``quality_value_usd``. In mode ``floor`` it is
    doubted below ``quality_floor`` times P(right of the highest tier). Without estimates the floor itself is asked for.

    Parameters
    ----------
    available : the tiers this request may use now, in the ladder's order
    """
    escalation = policy.escalation
    if escalation.mode is EscalationMode.OFF or facts.kill_switch or facts.overrides.tier is not None:
        return ()
    by_index = {tier.index: tier for tier in available}
    return tuple(
        Rung(
            tier, target, escalation.least_confidence.get(tier, _least(by_index[target], available[-1], facts, policy))
        )
        for tier, target in targets(indexes(available), escalation.mode).items()
    )


def _least(target: Tier, top: Tier, facts: RequestFacts, policy: Policy) -> float:
    estimates = usable_estimates(facts)
    if policy.mode is ThresholdMode.BENEFIT and policy.quality_value_usd and target.index in estimates:
        price = expected_cost_usd(target, facts, policy) / policy.quality_value_usd
        return max(0.0, estimates[target.index].p_right - float(price))
    if top.index in estimates:
        return policy.quality_floor * estimates[top.index].p_right
    return policy.quality_floor
