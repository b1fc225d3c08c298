"""From facts to a decision: limits, choice, exploration, and the order of what to try after it."""

from __future__ import annotations

from dataclasses import replace

from policies.escalation import EscalationMode
from policies.escalation_path import escalation_path
from policies.exploration import Uniform, draw_tier, propensities
from policies.fallback import fallback_order
from policies.ladder import Ladder
from policies.limits import (
    able_tiers,
    affordable_tiers,
    available_tiers,
    barred_tiers,
    fitting_tiers,
    indexes,
    permitted_tiers,
)
from policies.policy import FallbackMode, Policy, StickyMode
from policies.stand_ins import candidate_tiers, stand_ins
from policies.tier_choice import TierChoice, choose, exploration_tiers, usable_estimates
from policies.turn_lock import TurnLock
from policies.types import ReasonCode, RequestFacts, RoutingDecision

_SAID_OTHERWISE = frozenset({ReasonCode.PINNED, ReasonCode.KILL_SWITCH})


def decide(facts: RequestFacts, policy: Policy, ladder: Ladder, rng: Uniform) -> RoutingDecision:
    """Choose the tier that answers a request.

    Pure: the same facts, policy, ladder and state of ``rng`` give the same decision. One number is drawn from ``rng``
    when the request may be explored, none otherwise.

    Parameters
    ----------
    facts : what is known of the request and of the tiers now
    policy : the rule; see :class:`~policies.policy.Policy`
    ladder : the tiers, numbered 1, 2, 3 … from the cheapest
    rng : source of the exploration's randomness, such as ``random.Random(seed)``

    Raises
    ------
    UnknownTier, ConflictingLimits
        The request asks for what the ladder or the policy does not have.
    OutsideRegions, BeyondCost
        Policy and request leave no tier by where it is, or by what it is expected to cost.
    NoTierFits
        The prompt is beyond the context of every permitted tier.
    NoTierAvailable
        Every tier that fits is down or full, or the wanted one is and none may stand in for it.
    """
    permitted = affordable_tiers(facts, policy, permitted_tiers(facts.overrides, policy, ladder))
    fitting = fitting_tiers(facts, permitted)
    able = able_tiers(facts, fitting)
    available = available_tiers(facts, able)
    if facts.lock is not None and _keeps_lock(facts.lock, available, facts):
        return _locked(facts.lock, available, facts, policy, ladder)
    candidates = candidate_tiers(able, available, facts, policy, ladder)
    best = _choose_and_say_why(permitted, fitting, candidates, facts, policy, ladder)
    if facts.lock is not None:
        best = _left_lock(best, facts.lock)
    tiers = indexes(candidates)
    share = policy.exploration_share if _may_explore(facts, policy, tiers) else 0.0
    parts = exploration_tiers(best, candidates, facts, policy) if share > 0.0 else tiers
    chances = propensities(best.tier, parts, share)
    tier = draw_tier(best.tier, parts, share, rng) if share > 0.0 else best.tier
    explored = tier != best.tier
    estimate = usable_estimates(facts).get(tier)
    return RoutingDecision(
        tier=tier,
        ladder=_fallbacks(tier, best.tier, available, facts, policy, ladder),
        propensity=chances[tier],
        propensities=chances,
        reason=ReasonCode.EXPLORED if explored else best.reason,
        explored=explored,
        confidence=estimate.p_as_good if estimate is not None else None,
        detail=f"explored instead of tier {best.tier}; {best.detail}" if explored else best.detail,
        # Off by default, and then not worth a call.
        escalation_path=()
        if policy.escalation.mode is EscalationMode.OFF
        else escalation_path(available, facts, policy),
        barred=barred_tiers(facts, policy, ladder),
    )


def _fallbacks(
    tier: int, best: int, available: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder
) -> tuple[int, ...]:
    """Return the tiers to try after ``tier``: the best one, where another was explored, and its stand-ins."""
    if facts.overrides.tier is not None or policy.fallback is FallbackMode.NONE:
        return ()
    others = indexes(stand_ins(best, available, facts, policy, ladder))
    if tier != best:
        others = (best, *(each for each in others if each != tier))
        if policy.fallback is FallbackMode.UP_ONLY:
            others = tuple([each for each in others if each > tier])
    return fallback_order(tier, others, policy.max_fallbacks)


def _choose_and_say_why(
    permitted: Ladder, fitting: Ladder, candidates: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder
) -> TierChoice:
    """Return the choice among what is left, with the reason it is not what the policy alone would have chosen."""
    if facts.overrides.tier is not None:
        return TierChoice(facts.overrides.tier, ReasonCode.PINNED, "the request asked for this tier")
    if len(permitted) == 1:
        return TierChoice(permitted[0].index, ReasonCode.ONLY_ALLOWED, "no other tier is allowed")
    best = choose(candidates, facts, policy, ladder)
    if len(candidates) == len(permitted):
        return best
    wanted, fits = choose(permitted, facts, policy, ladder), choose(fitting, facts, policy, ladder)
    if wanted.tier != fits.tier:
        detail = f"tier {wanted.tier} is too short for {facts.num_prompt_tokens} prompt tokens; {best.detail}"
        return TierChoice(best.tier, ReasonCode.CONTEXT, detail)
    if fits.tier != best.tier:
        return TierChoice(best.tier, ReasonCode.OVERLOAD, f"tier {fits.tier} cannot take it now; {best.detail}")
    return best


def _may_explore(facts: RequestFacts, policy: Policy, tiers: tuple[int, ...]) -> bool:
    stays = facts.session is not None and policy.sticky is StickyMode.ALWAYS and facts.session.tier in tiers
    return (
        len(tiers) > 1
        and facts.overrides.explore
        and facts.overrides.tier is None
        and not facts.kill_switch
        and not stays
        and facts.lock is None
    )


def _keeps_lock(lock: TurnLock, available: Ladder, facts: RequestFacts) -> bool:
    """Whether the model that began the turn goes on: unless it cannot, may not, or somebody said otherwise."""
    return not facts.kill_switch and facts.overrides.tier is None and lock.tier in indexes(available)


def _locked(lock: TurnLock, available: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder) -> RoutingDecision:
    """Return the turn's own decision: nothing is drawn or weighed again, so its probability is 1."""
    path = () if policy.escalation.mode is EscalationMode.OFF else escalation_path(available, facts, policy)
    return RoutingDecision(
        tier=lock.tier,
        ladder=_fallbacks(lock.tier, lock.tier, available, facts, policy, ladder),
        propensity=1.0,
        propensities={lock.tier: 1.0},
        reason=ReasonCode.LOCKED,
        explored=False,
        confidence=lock.confidence,
        detail=f"the turn began at tier {lock.tier}",
        # A doubt does not end a turn; what is wrong for certain does.
        escalation_path=tuple([replace(rung, least_confidence=0.0) for rung in path]),
        barred=barred_tiers(facts, policy, ladder),
    )


def _left_lock(best: TierChoice, lock: TurnLock) -> TierChoice:
    """Say of a choice that the tier which began the turn could not go on."""
    if best.tier == lock.tier or best.reason in _SAID_OTHERWISE:
        return best
    return TierChoice(best.tier, ReasonCode.UNLOCKED, f"tier {lock.tier} began the turn; {best.detail}")
