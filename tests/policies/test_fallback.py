"""The fallback flow, pumped with plain values."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from policies.fallback import FallbackEnding, FallbackOutcome, fallback_flow, fallback_order
from policies.types import ReasonCode, RoutingDecision

DECISION = RoutingDecision(
    tier=2,
    ladder=(3, 4, 1),
    propensity=1.0,
    propensities={2: 1.0},
    reason=ReasonCode.SUFFICIENT,
    explored=False,
    confidence=0.9,
)


def pump(outcomes: Sequence[FallbackOutcome]) -> tuple[list[int], FallbackEnding | None]:
    """Tiers tried and how it ended; None when the flow wanted more outcomes than there were."""
    flow = fallback_flow(DECISION)
    tried = [next(flow).tier]
    for outcome in outcomes:
        try:
            tried.append(flow.send(outcome).tier)
        except StopIteration as end:
            return tried, end.value
    return tried, None


def test_a_rejection_ends_the_flow() -> None:
    final = FallbackOutcome.REJECTED
    assert pump([FallbackOutcome.FAILED, final]) == ([2, 3], FallbackEnding(final, 1))


@given(
    st.lists(
        st.sampled_from([each for each in FallbackOutcome if each is not FallbackOutcome.REJECTED]),
        min_size=4,
        max_size=4,
    )
)
def test_every_tier_is_tried_once_and_one_failure_is_shown(outcomes: list[FallbackOutcome]) -> None:
    tried, ending = pump(outcomes)
    assert tried == [2, 3, 4, 1]
    assert ending is not None
    assert outcomes[ending.decisive] is ending.outcome
    assert outcomes.index(ending.outcome) == ending.decisive


def test_what_the_caller_can_mend_is_shown_before_what_waiting_mends() -> None:
    failures = [FallbackOutcome.FAILED, FallbackOutcome.TIMED_OUT, FallbackOutcome.OVERLOADED, FallbackOutcome.TOO_LONG]
    assert pump(failures)[1] == FallbackEnding(FallbackOutcome.TOO_LONG, 3)
    assert pump([*failures[:3], FallbackOutcome.FAILED])[1] == FallbackEnding(FallbackOutcome.OVERLOADED, 2)


def test_order_goes_up_first() -> None:
    assert fallback_order(2, (1, 3, 4), 3) == (3, 4, 1)
    assert fallback_order(4, (1, 2, 3), 3) == (3, 2, 1)
    assert fallback_order(2, (), 3) == ()
    assert fallback_order(2, (1, 3, 4), 1) == (3,)
