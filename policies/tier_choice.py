"""The best tier among those a request may use, by the policy's rule. Deterministic; exploration comes after it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from policies.ladder import Ladder
from policies.policy import Policy, StickyMode
from policies.pricing import expected_cost_usd, switch_cost_usd
from policies.types import ReasonCode, RequestFacts, ThresholdMode, Tier, TierEstimate


class TierChoice(Struct, frozen=True):
    """A tier, the rule that chose it, and the numbers the rule saw."""

    tier: int
    reason: ReasonCode
    detail: str


def choose(candidates: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder) -> TierChoice:
    """Choose among ``candidates``, which are not empty and in the ladder's order.

    The rules in their order: the kill switch; a conversation that must stay; no trustworthy estimate; the policy's
    mode. What cannot be judged goes to the highest candidate, the safe choice. Last, a quarantined tier
    gives up what does not reach the more that is asked of it; that only ever moves a request up.
    """
    best = _chosen(candidates, facts, policy, ladder)
    return _out_of_quarantine(best, candidates, facts, policy) if facts.quarantine else best


def _chosen(candidates: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder) -> TierChoice:
    if facts.kill_switch:
        return TierChoice(candidates[-1].index, ReasonCode.KILL_SWITCH, "the kill switch sends all traffic up")
    session = facts.session if policy.sticky is not StickyMode.OFF else None
    if session is not None and policy.sticky is StickyMode.ALWAYS and _has(candidates, session.tier):
        return TierChoice(session.tier, ReasonCode.STICKY, f"the conversation stays at tier {session.tier}")
    if policy.max_novelty is not None and facts.novelty > policy.max_novelty:
        detail = f"novelty {facts.novelty:.3f} is above {policy.max_novelty:g}"
        return TierChoice(candidates[-1].index, ReasonCode.NOVEL, detail)
    best = _by_mode(candidates, facts, policy, ladder)
    if session is not None and best.tier == session.tier and best.reason is not ReasonCode.NO_ESTIMATE:
        alone = _by_mode(candidates, replace(facts, session=None), policy, ladder)
        if alone.tier != best.tier:
            saved = f"tier {alone.tier} would lose {session.cached_tokens} cached tokens"
            return TierChoice(best.tier, ReasonCode.STICKY, f"{saved}; {best.detail}")
    return best


def _out_of_quarantine(best: TierChoice, candidates: Ladder, facts: RequestFacts, policy: Policy) -> TierChoice:
    """Return the choice, or the first tier above it that suffices and is not quarantined; the highest always does.

    By benefit no tier has a threshold; there the next one must not be expected to be the worse.
    """
    return _moved(best, _first_out_of_quarantine(best.tier, candidates, facts, policy))


def _first_out_of_quarantine(start: int, candidates: Ladder, facts: RequestFacts, policy: Policy) -> int:
    estimates = usable_estimates(facts)
    p_left = 0.0
    for tier in candidates[:-1]:
        if tier.index < start:
            continue
        p_as_good = estimates[tier.index].p_as_good if tier.index in estimates else -1.0
        least = facts.quarantine.get(tier.index, -math.inf)
        if tier.index != start:
            least = max(least, policy.threshold(tier.index) if policy.mode is ThresholdMode.FLOOR else p_left)
        if p_as_good >= least:
            return tier.index
        p_left = max(p_left, p_as_good)
    return candidates[-1].index


def exploration_tiers(best: TierChoice, candidates: Ladder, facts: RequestFacts, policy: Policy) -> tuple[int, ...]:
    """Return the tiers that exploration may choose, one a candidate; the next higher tier replaces a quarantined one.

    Exploring serves the answer, so it counts against the floor; the floor leaves room for it only where nothing is
    quarantined. What a quarantined tier is worth is learnt by downward sampling (:mod:`policies.sampling`).
    """
    if best.reason is ReasonCode.NOVEL:
        return (best.tier,) * len(candidates)
    if not facts.quarantine:
        return tuple([tier.index for tier in candidates])
    return tuple(_first_out_of_quarantine(tier.index, candidates, facts, policy) for tier in candidates)


def _moved(best: TierChoice, tier: int) -> TierChoice:
    if tier == best.tier:
        return best
    return TierChoice(tier, ReasonCode.QUARANTINED, f"tier {best.tier} is in doubt; {best.detail}")


def candidate_costs_usd(candidates: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder) -> dict[int, float]:
    """Expected cost per tier, with the loss of a conversation's cache charged to every tier that does not hold it."""
    costs = {tier.index: expected_cost_usd(tier, facts, policy) for tier in candidates}
    session = facts.session if policy.sticky is not StickyMode.OFF else None
    holder = next((tier for tier in ladder if session is not None and tier.index == session.tier), None)
    if session is not None and holder is not None:
        lost = switch_cost_usd(holder, session.cached_tokens, policy)
        costs = {index: cost if index == holder.index else cost + lost for index, cost in costs.items()}
    return {index: float(cost) for index, cost in costs.items()}


def usable_estimates(facts: RequestFacts) -> dict[int, TierEstimate]:
    """Estimates by tier, without those that are not probabilities."""
    if not facts.estimates:
        return {}
    return {each.tier: each for each in facts.estimates if 0.0 <= each.p_right <= 1.0 and 0.0 <= each.p_as_good <= 1.0}


def _by_mode(candidates: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder) -> TierChoice:
    estimates = usable_estimates(facts)
    known = tuple(tier for tier in candidates if tier.index in estimates)
    if not known:
        return TierChoice(candidates[-1].index, ReasonCode.NO_ESTIMATE, "no estimate for any tier it may use")
    if policy.mode is ThresholdMode.FLOOR:
        return _cheapest_sufficient(candidates, estimates, facts, policy, ladder)
    if policy.quality_value_usd is None:
        return TierChoice(candidates[-1].index, ReasonCode.NO_ESTIMATE, "the policy does not say what quality is worth")
    costs_usd = candidate_costs_usd(candidates, facts, policy, ladder)
    return _most_beneficial(known, estimates, costs_usd, float(policy.quality_value_usd))


def _cheapest_sufficient(
    candidates: Ladder, estimates: Mapping[int, TierEstimate], facts: RequestFacts, policy: Policy, ladder: Ladder
) -> TierChoice:
    """Return the least cost among the tiers whose P(as good) reaches their threshold; the ladder's top always does."""
    top = ladder[-1].index
    p_as_good = {tier.index: 1.0 if tier.index == top else _p_as_good(estimates, tier) for tier in candidates}
    below_top = [index for index in p_as_good if index != top and p_as_good[index] >= policy.threshold(index)]
    detail = ", ".join(f"tier {index} {p:.3f}/{policy.threshold(index):.3f}" for index, p in p_as_good.items())
    if not below_top:
        # Without the top among the candidates the likeliest to be as good stands in; of equals, the higher.
        best = max(p_as_good, key=lambda index: (p_as_good[index], index))
        return TierChoice(best, ReasonCode.NONE_SUFFICES, f"P(as good)/needed: {detail}")
    sufficient = tuple([tier for tier in candidates if tier.index == top or tier.index in below_top])
    costs_usd = candidate_costs_usd(sufficient, facts, policy, ladder)
    best = min(costs_usd, key=lambda index: (costs_usd[index], index))
    return TierChoice(best, ReasonCode.SUFFICIENT, f"P(as good)/needed: {detail}")


def _most_beneficial(
    known: Ladder, estimates: Mapping[int, TierEstimate], costs_usd: Mapping[int, float], value_usd: float
) -> TierChoice:
    """The largest worth of being right less cost. No order of tiers is assumed: a dearer tier may be the worse one."""
    net_usd = {tier.index: value_usd * estimates[tier.index].p_right - costs_usd[tier.index] for tier in known}
    best = max(net_usd, key=lambda index: (net_usd[index], -costs_usd[index], -index))
    detail = ", ".join(f"tier {index} {net:.6f}" for index, net in net_usd.items())
    return TierChoice(best, ReasonCode.BENEFIT, f"worth of P(right) less cost, USD: {detail}")


def _p_as_good(estimates: Mapping[int, TierEstimate], tier: Tier) -> float:
    return estimates[tier.index].p_as_good if tier.index in estimates else -1.0


def _has(candidates: Ladder, index: int) -> bool:
    return any(tier.index == index for tier in candidates)
