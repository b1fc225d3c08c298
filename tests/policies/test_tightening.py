"""A tier in doubt gives requests up, and never takes one from a tier above."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from policies.errors import PolicyError
from policies.policy import Policy
from policies.routing_decision import decide
from policies.types import ReasonCode, RequestFacts, Tier
from tests.policies.strategies import LADDER, TIERS, estimates, facts, ladders, policies
from tests.policies.test_decide import PLAIN, WORTH, decided, request

quarantine = st.dictionaries(st.sampled_from(TIERS), st.floats(0, 2))


@pytest.mark.slow
@settings(max_examples=500)
@given(facts, policies, ladders(), quarantine, st.dictionaries(st.sampled_from(TIERS), st.floats(0, 1)), st.integers())
def test_tightening_never_lowers_a_tier(
    asked: RequestFacts,
    policy: Policy,
    ladder: tuple[Tier, ...],
    quarantine: dict[int, float],
    more: dict[int, float],
    seed: int,
) -> None:
    tighter = {tier: quarantine.get(tier, 0.0) + more.get(tier, 0.0) for tier in {*quarantine, *more}}
    tiers: list[int] = []
    for each in ({}, quarantine, tighter):
        with contextlib.suppress(PolicyError):
            tiers.append(decide(structs.replace(asked, quarantine=each), policy, ladder, random.Random(seed)).tier)
    assert len(tiers) in (0, 3)
    assert tiers == sorted(tiers)


def test_a_closed_tier_gives_everything_up() -> None:
    asked = request(estimates=estimates((0.99, 0.97, 0.98, 0.99)))
    assert decided(asked).tier == 1
    moved = decided(structs.replace(asked, quarantine={1: 2.0}))
    assert (moved.tier, moved.reason) == (2, ReasonCode.QUARANTINED)
    assert "tier 1 is in doubt" in moved.detail
    assert decided(structs.replace(asked, quarantine={1: 2.0, 2: 2.0, 3: 2.0})).tier == LADDER[-1].index


def test_a_tier_keeps_what_reaches_the_more_that_is_asked() -> None:
    asked = request(estimates=estimates((0.97, 0.98, 0.98, 0.99)))
    assert decided(structs.replace(asked, quarantine={1: 0.96})) == decided(asked)
    assert decided(structs.replace(asked, quarantine={1: 0.975})).tier == 2


def test_tiers_above_are_not_touched() -> None:
    asked = request()
    assert decided(asked).tier == 2
    assert decided(structs.replace(asked, quarantine={1: 2.0})) == decided(asked)


def test_by_benefit_it_moves_to_no_worse_tier() -> None:
    asked = request(estimates=estimates((0.99, 0.90, 0.995, 1.0)))
    assert decided(asked, WORTH).tier == 1
    assert decided(structs.replace(asked, quarantine={1: 2.0}), WORTH).tier == 3


def test_exploration_does_not_serve_what_is_in_doubt() -> None:
    policy = replace(PLAIN, exploration_share=0.4)
    asked = request(estimates=estimates((0.99, 0.97, 0.98, 0.99)))
    assert decided(asked, policy).propensities == pytest.approx({1: 0.7, 2: 0.1, 3: 0.1, 4: 0.1})
    # Tier 1's part and choice go to the tier that stands in for it.
    in_doubt = decided(structs.replace(asked, quarantine={1: 2.0}), policy)
    assert in_doubt.propensities == pytest.approx({2: 0.8, 3: 0.1, 4: 0.1})
    closed = decided(structs.replace(asked, quarantine={1: 2.0, 2: 2.0, 3: 2.0}), policy)
    assert (closed.tier, dict(closed.propensities)) == (4, {4: 1.0})


def test_exploration_does_not_serve_foreign_prompts_below_the_top() -> None:
    policy = replace(PLAIN, exploration_share=0.4, max_novelty=0.5)
    assert dict(decided(request(novelty=0.6), policy).propensities) == {4: 1.0}
    assert len(decided(request(novelty=0.4), policy).propensities) == 4


def test_what_the_request_pins_stays() -> None:
    from policies.types import Overrides

    asked = request(overrides=Overrides(tier=1), quarantine={1: 2.0})
    assert decided(asked, PLAIN).tier == 1
