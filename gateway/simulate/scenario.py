"""Scenarios: what happens to the traffic, the tiers, the prices and the judge while weeks pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal

HARD_FAMILIES = ("comparison", "counting", "prices", "units")
"""Families that change their nature in the scenarios of drift."""


@dataclass(frozen=True, slots=True)
class SimulatedJudge:
    """A grader with known errors: chances that it calls a sound answer sound, and a fault a fault.

    The defaults are what was measured of reading an answer with the built-in ladder (docs/verification.md).
    """

    knows_sound: float = 0.989
    knows_fault: float = 0.937


@dataclass(frozen=True, slots=True)
class Conditions:
    """The world at one moment.

    Attributes
    ----------
    worse : tier -> what is left of its accuracy, 0..1
    hardened : family -> what is left there of the accuracy of every tier below the top, 0..1
    harder_share : share of traffic drawn from the hardened families
    price_factors : tier -> its price over the configured one
    judge : who checks
    attacked_share : share of the traffic that one tenant sends with a prefix made to reach the top tier
    """

    worse: Mapping[int, float] = field(default_factory=dict)
    hardened: Mapping[str, float] = field(default_factory=dict)
    harder_share: float = 0.0
    price_factors: Mapping[int, Decimal] = field(default_factory=dict)
    judge: SimulatedJudge = SimulatedJudge()
    attacked_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A story: calm until ``starts_at``, then a change over ``takes`` (both as shares of the whole time)."""

    name: str
    about: str
    starts_at: float = 0.4
    takes: float = 0.0
    before: Conditions = Conditions()
    after: Conditions = Conditions()

    def at(self, progress: float) -> Conditions:
        """Return the world when ``progress`` (0..1) of the time has passed."""
        if progress < self.starts_at:
            return self.before
        if progress >= self.starts_at + self.takes:
            return self.after
        return _between(self.before, self.after, (progress - self.starts_at) / self.takes)


def _between(before: Conditions, after: Conditions, part: float) -> Conditions:
    """On the way: what is left of accuracies, and the share of the hardened families."""

    def mixed(first: float, last: float) -> float:
        return first + part * (last - first)

    return replace(
        after,
        worse={tier: mixed(before.worse.get(tier, 1.0), left) for tier, left in after.worse.items()},
        hardened={family: mixed(before.hardened.get(family, 1.0), left) for family, left in after.hardened.items()},
        harder_share=mixed(before.harder_share, after.harder_share),
        attacked_share=mixed(before.attacked_share, after.attacked_share),
    )


_SHIFTED = Conditions(hardened=dict.fromkeys(HARD_FAMILIES, 0.25), harder_share=0.35)

SCENARIOS: Mapping[str, Scenario] = {
    each.name: each
    for each in (
        Scenario("stationary", "Nothing changes: every alarm is a false one."),
        Scenario("abrupt", "From one hour to the next four kinds of task defeat the lower tiers.", after=_SHIFTED),
        Scenario("gradual", "The same, over a third of the time.", takes=0.33, after=_SHIFTED),
        Scenario(
            "tier-worse",
            "Tier 2 loses a third of its accuracy, as a bad model update would.",
            after=Conditions(worse={2: 0.67}),
        ),
        Scenario("prices", "Tier 1 becomes ten times as dear.", after=Conditions(price_factors={1: Decimal(10)})),
        Scenario(
            "biased-judge",
            "The judge begins to call half of all faults sound, while four kinds of task harden.",
            after=replace(_SHIFTED, judge=SimulatedJudge(knows_fault=0.5)),
        ),
        Scenario(
            "attack",
            "A tenant begins to put a prefix before its prompts that sends them to the top tier.",
            after=Conditions(attacked_share=0.25),
        ),
    )
}
