"""Who may answer in place of a tier that is down, full or too slow, without the quality falling below the policy's.

What it does
    Leaves of the tiers that could take a request those that may stand in for the one that the policy wants: the top
    tier that it permits, tiers that suffice by its thresholds, and tiers that are estimated no worse than the wanted
    one.

Why
    An outage must not lower the floor in silence. A caller can repeat a request that got 503; it cannot know that a
    right-looking answer came from a tier that the policy would not have chosen.

Known problems
    An estimate is only as good as its router. Where it is not to be trusted (kill switch, foreign prompt, none at
    all) only higher tiers stand in.

Options
    See :class:`~policies.policy.FallbackMode`.
"""

from __future__ import annotations

import math

from policies.errors import NoTierAvailable
from policies.ladder import Ladder
from policies.limits import prompt_tiers
from policies.policy import FallbackMode, Policy
from policies.tier_choice import choose, usable_estimates
from policies.types import RequestFacts


def stand_ins(wanted: int, tiers: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder) -> Ladder:
    """Return the tiers, other than the wanted one, that may answer in its place; in the ladder's order."""
    mode, others = policy.fallback, tuple([tier for tier in tiers if tier.index != wanted])
    if mode is FallbackMode.NONE or not others:
        return ()
    if mode is FallbackMode.ANY:
        return others
    if mode is FallbackMode.UP_ONLY:
        others = tuple([tier for tier in others if tier.index > wanted])
    top = policy.top(ladder)
    p_as_good = {tier: each.p_as_good for tier, each in usable_estimates(facts).items()}
    p_wanted = 1.0 if wanted == top else p_as_good.get(wanted, 1.0)
    is_trusted = not facts.kill_switch and not (policy.max_novelty is not None and facts.novelty > policy.max_novelty)
    if not facts.quarantine and not (p_as_good and is_trusted):
        return tuple([tier for tier in others if tier.index > wanted or tier.index == top])

    def may_stand_in(tier: int) -> bool:
        if tier == top:
            return True
        p = p_as_good.get(tier)
        if (p if p is not None else -1.0) < facts.quarantine.get(tier, -math.inf):
            return False
        if p is None or not is_trusted:
            return tier > wanted
        return p >= min(policy.threshold(tier), p_wanted)

    return tuple([tier for tier in others if may_stand_in(tier.index)])


def candidate_tiers(able: Ladder, available: Ladder, facts: RequestFacts, policy: Policy, ladder: Ladder) -> Ladder:
    """Return the tiers to choose among now.

    All that can start in time, while the one that the policy wants is among them; else those that may stand in for it.
    Where nobody may, a wanted tier that is only slow is waited for.

    Parameters
    ----------
    able : the tiers that could answer this request, were they all up and idle; in the ladder's order
    available : those of them that are up

    Raises
    ------
    NoTierAvailable
        The wanted tier is down, and no tier that is up may stand in for it.
    """
    in_time = prompt_tiers(facts, policy, available)
    if len(in_time) == len(able) or facts.overrides.tier is not None:
        return in_time
    wanted = choose(able, facts, policy, ladder).tier
    if any(tier.index == wanted for tier in in_time):
        return in_time
    allowed = {tier.index for tier in stand_ins(wanted, available, facts, policy, ladder)} | {wanted}
    left = tuple([tier for tier in available if tier.index in allowed])
    if not left:
        raise NoTierAvailable([wanted])
    return prompt_tiers(facts, policy, left)
