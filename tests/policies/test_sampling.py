"""Drawing answers for verification: known probabilities, weighted totals without bias, tiers that may not be asked."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InvalidPolicy
from policies.policy import Policy
from policies.sampling import UNKNOWN, Sampling, chances, draw
from tests.policies.strategies import LADDER, TIERS

shares = st.floats(0, 1)
confidences = st.none() | shares | st.just(math.nan)
samplings = st.builds(
    Sampling,
    shares=st.dictionaries(st.sampled_from(TIERS), shares),
    edges=st.just((0.5, 0.9)),
    factors=st.tuples(*[st.floats(0, 4)] * 3),
    down_share=shares,
)


class Fixed:
    """Dice that show what they are told."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("shares.2", {2: 1.5}),
        ("edges", (0.9, 0.5)),
        ("edges", (0.0, 0.5)),
        ("factors", (1.0,)),
        ("factors", (1.0, -1.0, 1.0)),
        ("factors", (1.0, math.nan, 1.0)),
        ("down_share", -0.1),
    ],
)
def test_bad_fields_are_refused_by_name(field_name: str, value: Any) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        Sampling(**{field_name.split(".")[0]: value})
    assert caught.value.field_name == field_name


def test_a_share_for_a_tier_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidPolicy, match=r"sampling\.shares"):
        Policy(sampling=Sampling(shares={7: 0.5})).check_against(LADDER)


@given(samplings, shares, st.sampled_from(TIERS), st.sets(st.sampled_from(TIERS)), confidences, shares)
def test_chances_are_probabilities_and_lead_to_permitted_tiers(
    sampling: Sampling,
    share: float,
    tier: int,
    others: set[int],
    confidence: float | None,
    throttle: float,
) -> None:
    permitted = sorted(others | {tier})
    found = chances(sampling, share, tier, permitted, confidence, throttle)
    assert 0.0 <= found.up <= 1.0
    assert 0.0 <= found.down <= 1.0
    assert found.any <= 1.0 + 1e-12
    assert found.up_against in {None, permitted[-1]} - ({tier} if tier == permitted[-1] else set())
    assert found.up == 0.0 or tier != permitted[-1]
    assert found.down == 0.0 or found.down_against == max(other for other in permitted if other < tier)


@given(samplings, shares, st.sampled_from(TIERS), confidences, st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_carries_its_own_chance(
    sampling: Sampling, share: float, tier: int, confidence: float | None, u: float
) -> None:
    found = chances(sampling, share, tier, TIERS, confidence)
    drawn = draw(found, Fixed(u))
    if u < found.up:
        assert drawn is not None
        assert (drawn.direction, drawn.probability, drawn.against_tier) == ("up", found.up, TIERS[-1])
    elif u < found.any:
        assert drawn is not None
        assert (drawn.direction, drawn.probability, drawn.against_tier) == ("down", found.down, tier - 1)
    else:
        assert drawn is None


def test_less_sure_answers_are_drawn_more_often() -> None:
    found = [chances(Sampling(), 0.05, 1, TIERS, confidence).up for confidence in (0.5, 0.89, 0.9, 0.97, 0.98, 1.0)]
    assert found == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    assert chances(Sampling(), 0.05, 1, TIERS, None).stratum == UNKNOWN
    assert chances(Sampling(), 0.05, 1, TIERS, 0.95).stratum == "0.9-0.98"


def test_the_ends_of_the_ladder_are_checked_one_way() -> None:
    assert chances(Sampling(), 0.05, 1, TIERS, 0.95).down == 0.0
    top = chances(Sampling(), 0.05, 4, TIERS, 0.95)
    assert (top.up, top.up_against, top.down, top.down_against) == (0.0, None, 0.01, 3)
    assert chances(Sampling(), 0.05, 2, (2,), 0.95).any == 0.0
    middle = chances(Sampling(), 0.05, 2, TIERS, 0.95)
    assert (middle.logged, middle.any, top.logged) == (0.05, pytest.approx(0.06), 0.01)


def test_weighted_totals_are_unbiased() -> None:
    """Horvitz and Thompson's total over strata drawn at different rates meets the true one within 4 standard errors."""
    rng = random.Random(7)
    sampling = Sampling(edges=(0.9,), factors=(3.0, 0.5))
    traffic = [(rng.choice((0.5, 0.95, None)), rng.random() < 0.3) for _ in range(20_000)]
    true_total = sum(fault for _, fault in traffic)
    totals = []
    for seed in range(60):
        dice = random.Random(seed)
        total = 0.0
        for confidence, fault in traffic:
            drawn = draw(chances(sampling, 0.1, 1, TIERS, confidence), dice)
            if drawn is not None and drawn.direction == "up" and fault:
                total += 1 / drawn.probability
        totals.append(total)
    mean = sum(totals) / len(totals)
    error = math.sqrt(sum((each - mean) ** 2 for each in totals) / (len(totals) - 1) / len(totals))
    assert abs(mean - true_total) < 4 * error
