"""Fallback when a tier fails before its first token: the order, the flow, and the error to show when all failed.

The flow is a generator that yields attempts and is sent their outcomes, so whoever does the I/O pumps it, and a test
pumps it with plain values::

    flow = fallback_flow(decision)
    attempt = next(flow)
    while True:
        outcome = ...                       # serve attempt.tier
        try:
            attempt = flow.send(outcome)    # the next tier to try
        except StopIteration as end:
            ending = end.value              # which failure to show
            break
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from policies.types import RoutingDecision


class FallbackOutcome(StrEnum):
    """Says how one attempt failed, as far as falling back is concerned.

    ``rejected`` is the caller's to mend, so another tier would refuse it too. ``too_long`` is the caller's as well, but
    another tier may be longer.
    """

    REJECTED = "rejected"
    TOO_LONG = "too_long"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


_SHOWN_FIRST: tuple[FallbackOutcome, ...] = (
    FallbackOutcome.TOO_LONG,
    FallbackOutcome.OVERLOADED,
    FallbackOutcome.UNAVAILABLE,
    FallbackOutcome.TIMED_OUT,
    FallbackOutcome.FAILED,
)
"""When every tier failed: what the caller can mend, then what waiting mends, then what only we can mend."""


@dataclass(frozen=True, slots=True)
class FallbackAttempt:
    """One try: the tier, and its place among the tries from 0."""

    tier: int
    number: int


@dataclass(frozen=True, slots=True)
class FallbackEnding:
    """Says how the flow ended. ``decisive`` is the number of the attempt whose failure the caller is shown."""

    outcome: FallbackOutcome
    decisive: int


@lru_cache(1024)
def fallback_order(tier: int, stand_ins: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the tiers to try after ``tier``: dearer ones upwards first, then cheaper ones from the top."""
    order = sorted(each for each in stand_ins if each > tier)
    order += sorted((each for each in stand_ins if each < tier), reverse=True)
    return tuple(order[:most])


def fallback_flow(decision: RoutingDecision) -> Generator[FallbackAttempt, FallbackOutcome, FallbackEnding]:
    """Yield the tiers to try one after another until one attempt is rejected or the ladder is used up."""
    outcomes: list[FallbackOutcome] = []
    for number, tier in enumerate((decision.tier, *decision.ladder)):
        outcome = yield FallbackAttempt(tier, number)
        if outcome is FallbackOutcome.REJECTED:
            return FallbackEnding(outcome, number)
        outcomes.append(outcome)
    decisive = min(range(len(outcomes)), key=lambda number: (_SHOWN_FIRST.index(outcomes[number]), number))
    return FallbackEnding(outcomes[decisive], decisive)
