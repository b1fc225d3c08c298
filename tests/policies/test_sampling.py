"""Drawing answers for verification: known probabilities, weighted totals without bias, tiers that may not be asked."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InvalidPolicy
from policies.policy import Policy
from policies.sampling import (
    FAULTY,
    UNKNOWN,
    InclusionProbabilities,
    SampledAnswer,
    Sampling,
    draw_check,
    inclusion_probabilities,
)
from tests.policies.strategies import LADDER, TIERS

shares = st.floats(0, 1)
confidences = st.none() | shares | st.just(math.nan)
samplings = st.builds(
    Sampling,
    shares=st.dictionaries(st.sampled_from(TIERS), shares),
    edges=st.just((0.5, 0.9)),
    factors=st.tuples(*[st.floats(0, 4)] * 3),
    explored_factor=st.floats(0, 20),
    down_share=shares,
    doubt_share=shares,
)
answers = st.builds(SampledAnswer, st.sampled_from(TIERS), confidences, st.booleans(), st.booleans())
PRICES = {1: 0.0001, 2: 0.0004, 3: 0.0025, 4: 0.01}


def up_and_down(tier: int, confidence: float | None) -> InclusionProbabilities:
    return inclusion_probabilities(Sampling(), 0.05, SampledAnswer(tier, confidence), PRICES)


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
        ("edges", (0.5, 1.0)),
        ("edges", (0.5, 0.5)),
        ("factors", (1.0,)),
        ("factors", (1.0, -1.0, 1.0)),
        ("factors", (1.0, math.nan, 1.0)),
        ("explored_factor", -1.0),
        ("down_share", -0.1),
        ("doubt_share", 1.1),
    ],
)
def test_bad_fields_are_refused_by_name(field_name: str, value: Any) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        Sampling(**{field_name.split(".")[0]: value})
    assert caught.value.field_name == field_name


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("shares", {1: 0.0, 2: 1.0}),
        ("edges", (0.001, 0.999)),
        ("factors", (0.0, 0.0, 100.0)),
        ("explored_factor", 0.0),
        ("down_share", 0.0),
        ("down_share", 1.0),
        ("doubt_share", 0.0),
        ("doubt_share", 1.0),
    ],
)
def test_fields_may_lie_at_their_ends(field_name: str, value: Any) -> None:
    assert getattr(Sampling(**{field_name: value}), field_name) == value


def test_a_share_for_a_tier_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidPolicy, match=r"sampling\.shares"):
        Policy(sampling=Sampling(shares={7: 0.5})).check_against(LADDER)


@given(samplings, shares, answers, st.sets(st.sampled_from(TIERS)), st.floats(0, 50), shares)
def test_chances_are_probabilities_and_lead_to_permitted_tiers(
    sampling: Sampling, share: float, answered: SampledAnswer, others: set[int], factor: float, throttle: float
) -> None:
    permitted = sorted(others | {answered.tier})
    prices = {tier: PRICES[tier] for tier in permitted}
    found = inclusion_probabilities(sampling, share, answered, prices, factor=factor, throttle=throttle)
    assert 0.0 <= found.up <= 1.0
    assert all(0.0 <= chance <= 1.0 for _, chance in found.down)
    assert found.total <= 1.0 + 1e-12
    assert found.up_against == (permitted[-1] if answered.tier != permitted[-1] else None)
    assert found.up == 0.0 or answered.tier != permitted[-1]
    assert [tier for tier, _ in found.down] == [tier for tier in permitted if tier < answered.tier]


@given(samplings, shares, answers, st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_carries_its_own_chance(
    sampling: Sampling, share: float, answered: SampledAnswer, u: float
) -> None:
    found = inclusion_probabilities(sampling, share, answered, PRICES)
    drawn = draw_check(found, Fixed(u))
    if u < found.up:
        assert drawn is not None
        assert (drawn.direction, drawn.probability, drawn.against_tier) == ("up", found.up, TIERS[-1])
    elif u < found.total - 1e-9:
        assert drawn is not None
        assert (drawn.direction, drawn.probability) == ("down", dict(found.down)[drawn.against_tier])
    elif u > found.total + 1e-9:
        assert drawn is None


@given(samplings, answers)
def test_every_direction_and_tier_is_drawn_as_often_as_is_said(sampling: Sampling, answered: SampledAnswer) -> None:
    found = inclusion_probabilities(sampling, 0.05, answered, PRICES)
    num, counts = 4000, Counter[tuple[str, int]]()
    for place in range(num):
        drawn = draw_check(found, Fixed((place + 0.5) / num))
        if drawn is not None:
            counts[drawn.direction, drawn.against_tier] += 1
    assert counts["up", TIERS[-1]] / num == pytest.approx(found.up, abs=2 / num)
    for tier, chance in found.down:
        assert counts["down", tier] / num == pytest.approx(chance, abs=2 / num)


def test_less_sure_answers_are_drawn_more_often() -> None:
    found = [up_and_down(1, confidence).up for confidence in (0.5, 0.89, 0.9, 0.97, 0.98, 1.0)]
    assert found == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    assert up_and_down(1, None).stratum == UNKNOWN
    assert up_and_down(1, 0.95).stratum == "0.9-0.98"


def test_explored_answers_and_those_of_a_router_on_its_way_are_drawn_more_often() -> None:
    explored = inclusion_probabilities(Sampling(), 0.05, SampledAnswer(1, 0.95, is_explored=True), PRICES)
    on_its_way = inclusion_probabilities(Sampling(), 0.05, SampledAnswer(1, 0.95), PRICES, factor=8.0)
    assert (explored.up, on_its_way.up) == (0.5, 0.4)
    assert inclusion_probabilities(Sampling(), 0.05, SampledAnswer(1, 0.5), PRICES, factor=100.0).up == 1.0


def test_the_ends_of_the_ladder_are_checked_one_way() -> None:
    assert up_and_down(1, 0.95).down == ()
    top = up_and_down(4, 0.95)
    assert (top.up, top.up_against) == (0.0, None)
    assert top.logged == pytest.approx(0.01)
    assert inclusion_probabilities(Sampling(), 0.05, SampledAnswer(2, 0.95), {2: 0.1}).total == 0.0
    middle = up_and_down(2, 0.95)
    assert middle.logged == 0.05
    assert middle.total == pytest.approx(0.06)


def test_what_doubt_moved_up_is_asked_below_most_of_all_and_cheap_tiers_more_often() -> None:
    doubted = inclusion_probabilities(
        Sampling(doubt_share=0.6), 0.05, SampledAnswer(4, 0.95, downward_share=1.0), PRICES
    )
    assert doubted.total_down == pytest.approx(0.6)
    first, second, third = (chance for _, chance in doubted.down)
    # One over the root of the price: a tier four times as dear is asked half as often.
    assert first == pytest.approx(2 * second)
    assert first == pytest.approx(5 * third)


def test_half_a_doubt_asks_half_of_what_is_between() -> None:
    sampling = Sampling(doubt_share=0.9, down_share=0.1)
    asked = [
        inclusion_probabilities(
            sampling, 0.05, SampledAnswer(4, 0.95, downward_share=downward_share), PRICES
        ).total_down
        for downward_share in (0.0, 0.5, 1.0)
    ]
    assert asked == [pytest.approx(0.1), pytest.approx(0.5), pytest.approx(0.9)]
    modest = Sampling(doubt_share=0.0, down_share=0.1)
    assert inclusion_probabilities(
        modest, 0.05, SampledAnswer(4, 0.95, downward_share=1.0), PRICES
    ).total_down == pytest.approx(0.1)


def test_without_prices_the_lower_tiers_share_alike() -> None:
    found = inclusion_probabilities(Sampling(down_share=0.3), 0.05, SampledAnswer(4, 0.95), dict.fromkeys(TIERS, 0.0))
    assert [chance for _, chance in found.down] == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.slow
def test_weighted_totals_are_unbiased() -> None:
    """Horvitz and Thompson's total over strata drawn at different rates meets the true one within 4 standard errors."""
    rng = random.Random(7)
    sampling = Sampling(edges=(0.9,), factors=(3.0, 0.5))
    traffic = [(rng.choice((0.5, 0.95, None)), rng.random() < 0.3) for _ in range(10_000)]
    true_total = sum(fault for _, fault in traffic)
    totals = []
    for seed in range(60):
        dice = random.Random(seed)
        total = 0.0
        for confidence, fault in traffic:
            drawn = draw_check(inclusion_probabilities(sampling, 0.1, SampledAnswer(1, confidence), PRICES), dice)
            if drawn is not None and drawn.direction == "up" and fault:
                total += 1 / drawn.probability
        totals.append(total)
    mean = sum(totals) / len(totals)
    error = math.sqrt(sum((each - mean) ** 2 for each in totals) / (len(totals) - 1) / len(totals))
    assert abs(mean - true_total) < 4 * error


@pytest.mark.slow
def test_totals_are_unbiased_where_faults_are_known_without_a_draw() -> None:
    """Some losses show for nothing, some only in a check; known ones count with certainty, the others as drawn."""
    rng = random.Random(8)
    traffic = [rng.choice(("sound", "sound", "sound", "hidden", "known")) for _ in range(5_000)]
    chosen = inclusion_probabilities(Sampling(), 0.1, SampledAnswer(1, 0.95), PRICES)
    totals = []
    for seed in range(60):
        dice = random.Random(seed)
        drawn = [draw_check(chosen.of_faulty() if kind == "known" else chosen, dice) for kind in traffic]
        pairs = list(zip(drawn, traffic, strict=True))
        lost = [each for each, kind in pairs if each and each.direction == "up" and kind != "sound"]
        totals.append(sum(1 / each.probability for each in lost))
        assert all(each and each.stratum == FAULTY for each, kind in pairs if kind == "known")
    mean = sum(totals) / len(totals)
    error = math.sqrt(sum((each - mean) ** 2 for each in totals) / (len(totals) - 1) / len(totals))
    assert abs(mean - sum(kind != "sound" for kind in traffic)) < 4 * error


def test_what_cannot_be_drawn_is_not_in_the_sample_for_being_faulty() -> None:
    """Else all that is known of such traffic would be its faults."""
    for share, tier in ((0.0, 1), (0.5, 4)):
        chosen = inclusion_probabilities(Sampling(), share, SampledAnswer(tier, 0.95), PRICES)
        assert chosen.of_faulty() is chosen
