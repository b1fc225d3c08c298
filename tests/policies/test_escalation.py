"""Who answers in place of a tier that doubts its answer: the way up, and the flow pumped with plain verdicts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InvalidPolicy
from policies.escalation import Escalation, EscalationMode, EscalationVerdict, Rung, escalation_flow, targets
from policies.policy import Policy
from policies.routing_decision import decide
from policies.types import Overrides, RequestFacts, RoutingDecision, ThresholdMode, Tier, TierEstimate

LADDER = tuple(Tier(i, f"t{i}", f"m{i}", price_per_request_usd=Decimal(10 ** (i - 1))) for i in range(1, 5))
ESTIMATES = tuple(TierEstimate(i, 0.5 + 0.1 * i, 0.6 + 0.1 * i) for i in range(1, 5))
NEXT, TOP = EscalationMode.NEXT, EscalationMode.TOP


def decided(escalation: Escalation, **options: Any) -> RoutingDecision:
    names = ("estimates", "unavailable", "kill_switch", "overrides")
    facts = {name: options.pop(name) for name in names if name in options}
    known = RequestFacts(num_prompt_tokens=10, max_tokens=20, **{"estimates": ESTIMATES, **facts})
    policy = Policy(escalation=escalation, exploration_share=0.0, **{"quality_floor": 0.9, **options})
    return decide(known, policy, LADDER, random.Random(0))


def ways(decision: RoutingDecision) -> dict[int, int]:
    return {rung.tier: rung.target for rung in decision.escalation_path}


# The way up


def test_it_is_off_by_default_and_for_requests_that_chose_their_tier() -> None:
    assert decided(Escalation()).escalation_path == ()
    assert decided(Escalation(NEXT), overrides=Overrides(tier=2)).escalation_path == ()
    assert decided(Escalation(NEXT), kill_switch=True).escalation_path == ()


def test_every_tier_but_the_highest_has_a_way_within_what_the_request_permits() -> None:
    assert ways(decided(Escalation(NEXT))) == {1: 2, 2: 3, 3: 4}
    assert ways(decided(Escalation(TOP))) == {1: 4, 2: 4, 3: 4}
    assert ways(decided(Escalation(NEXT), overrides=Overrides(max_tier=3))) == {1: 2, 2: 3}
    assert ways(decided(Escalation(NEXT), unavailable=frozenset({2}))) == {1: 3, 3: 4}
    assert ways(decided(Escalation(TOP), allowed_tiers=(1, 3))) == {1: 3}
    assert ways(decided(Escalation(TOP), allowed_tiers=(2,))) == {}


def test_how_sure_a_tier_must_be() -> None:
    def least(escalation: Escalation, **options: Any) -> dict[int, float]:
        return {rung.tier: rung.least_confidence for rung in decided(escalation, **options).escalation_path}

    # By the floor: as good as the highest tier is expected to be, times the floor.
    assert least(Escalation(NEXT)) == pytest.approx({1: 0.81, 2: 0.81, 3: 0.81})
    assert least(Escalation(NEXT), estimates=()) == pytest.approx({1: 0.9, 2: 0.9, 3: 0.9})
    # By benefit: what the next one would get right, less its price in what a right answer is worth.
    benefit: dict[str, Any] = {"mode": ThresholdMode.BENEFIT, "quality_value_usd": Decimal(2000)}
    assert least(Escalation(NEXT), **benefit) == pytest.approx({1: 0.7 - 0.005, 2: 0.8 - 0.05, 3: 0.9 - 0.5})
    assert least(Escalation(TOP), **benefit) == pytest.approx({1: 0.4, 2: 0.4, 3: 0.4})
    assert least(Escalation(TOP), **benefit | {"quality_value_usd": Decimal(1)}) == {1: 0.0, 2: 0.0, 3: 0.0}
    # What the policy says counts.
    assert least(Escalation(NEXT, {2: 0.33}), **benefit)[2] == 0.33


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("least_confidence.2", {"least_confidence": {2: 1.5}}),
        ("least_confidence.2", {"least_confidence": {2: float("nan")}}),
        ("max_escalations", {"max_escalations": 0}),
        ("hold_back_tokens", {"hold_back_tokens": -1}),
    ],
)
def test_nonsense_is_refused_by_name(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        Escalation(NEXT, **options)
    assert caught.value.field_name == field


def test_a_tier_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidPolicy, match=r"escalation\.least_confidence"):
        Policy(escalation=Escalation(NEXT, {7: 0.5})).check_against(LADDER)


# The flow

WAY = tuple(Rung(tier, target, 0.5) for tier, target in targets((1, 2, 3, 4), NEXT).items())


def pump(verdicts: Sequence[EscalationVerdict], *, first: int = 1, most: int = 3) -> tuple[list[int], bool]:
    """Tiers asked, and whether the flow ended with the last verdict."""
    flow = escalation_flow(first, WAY, most)
    asked = [next(flow).tier]
    for verdict in verdicts:
        try:
            asked.append(flow.send(verdict).tier)
        except StopIteration:
            return asked, True
    return asked, False


def test_a_trusted_answer_ends_it_and_a_doubted_one_goes_up() -> None:
    trusted, doubted = EscalationVerdict.TRUSTED, EscalationVerdict.DOUBTED
    assert pump([trusted]) == ([1], True)
    assert pump([doubted, trusted]) == ([1, 2], True)
    assert pump([doubted] * 3 + [trusted]) == ([1, 2, 3, 4], True)
    assert pump([doubted] * 2, most=1) == ([1, 2], True)
    assert pump([trusted], first=4) == ([4], True)


def test_when_a_higher_tier_fails_the_next_is_asked_as_far_as_the_policy_permits() -> None:
    trusted, doubted, failed = EscalationVerdict.TRUSTED, EscalationVerdict.DOUBTED, EscalationVerdict.FAILED
    assert pump([doubted, failed], most=1) == ([1, 2], True)
    assert pump([doubted, failed, trusted], most=2) == ([1, 2, 3], True)
    assert pump([doubted, doubted, failed, failed]) == ([1, 2, 3, 4], True)


@given(
    verdicts=st.lists(st.sampled_from(list(EscalationVerdict)), min_size=6, max_size=6),
    first=st.integers(1, 4),
    most=st.integers(1, 5),
    mode=st.sampled_from([NEXT, TOP]),
)
def test_it_only_ever_goes_up_and_always_ends(
    verdicts: list[EscalationVerdict], first: int, most: int, mode: EscalationMode
) -> None:
    way = tuple(Rung(tier, target, 0.5) for tier, target in targets((1, 2, 3, 4), mode).items())
    flow = escalation_flow(first, way, most)
    attempt, asked, has_ended = next(flow), [first], False
    for number, verdict in enumerate(verdicts):
        assert (attempt.rung is None) == (attempt.tier == 4 or number == most)
        try:
            attempt = flow.send(verdict)
        except StopIteration:
            has_ended = True
            break
        asked.append(attempt.tier)
    assert has_ended
    assert asked == sorted(set(asked))
    assert len(asked) <= most + 1
