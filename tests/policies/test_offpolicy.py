"""What another policy would have earned: unbiased, covered as stated, refused where the log is blind. Promotion too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from policies.offpolicy import (
    LoggedRows,
    doubly_robust,
    inverse_propensity,
    paired_difference,
    self_normalised,
)
from policies.promotion import PromotionRule, PromotionVerdict, judge_promotion

COSTS = np.array([0.0001, 0.0005, 0.003])


@dataclass(frozen=True)
class World:
    """Requests with known probabilities of success per tier, and a log of what one policy did with them."""

    p_right: np.ndarray
    logged: LoggedRows
    serving: np.ndarray


def one_hot(columns: np.ndarray) -> np.ndarray:
    return np.eye(3)[columns]


def world_of(rng: np.random.Generator, num_rows: int, *, share: float = 0.1, modelled: bool = True) -> World:
    difficulty = rng.beta(1, 1.5, size=(num_rows, 1))
    p_right = 1 / (1 + np.exp(-8 * (np.array([0.4, 0.6, 1.0]) - difficulty)))
    serving = one_hot(np.where(difficulty[:, 0] < 0.3, 0, np.where(difficulty[:, 0] < 0.6, 1, 2)))
    propensity = (1 - share) * serving + share / 3
    chosen = (rng.random((num_rows, 1)) > propensity.cumsum(axis=1)).sum(axis=1).clip(0, 2)
    right = (rng.random(num_rows) < p_right[np.arange(num_rows), chosen]).astype(np.float64)
    # A model that is biased and blurred, as one fitted on little would be.
    predicted = np.clip(0.8 * p_right + 0.05, 0, 1) if modelled else None
    return World(p_right, LoggedRows(chosen.astype(np.int64), propensity, right, predicted), serving)


def bolder(world: World) -> np.ndarray:
    """A target that keeps more traffic on the middle tier."""
    return one_hot(np.where(world.p_right[:, 0] > 0.7, 0, np.where(world.p_right[:, 1] > 0.3, 1, 2)))


@pytest.mark.parametrize("estimator", [inverse_propensity, self_normalised, doubly_robust])
@pytest.mark.parametrize("modelled", [False, True])
def test_intervals_cover_the_truth(estimator: object, modelled: bool) -> None:
    assert callable(estimator)
    rng = np.random.default_rng(11)
    covered, errors = [], []
    for _ in range(150):
        world = world_of(rng, 1500, modelled=modelled)
        target = bolder(world)
        found = estimator(world.logged, target).estimate
        covered.append(found.low <= TRUE_VALUE <= found.high)
        errors.append(found.value - TRUE_VALUE)
    # 93 % is what thousands of runs must show; 150 runs may fall short of it by chance.
    assert np.mean(covered) >= 0.90
    assert abs(np.mean(errors)) < 0.02


def _true_value() -> float:
    difficulty = (np.arange(400_000) + 0.5) / 400_000
    difficulty = 1 - (1 - difficulty) ** (1 / 1.5)  # quantiles of beta(1, 1.5)
    p = 1 / (1 + np.exp(-8 * (np.array([0.4, 0.6, 1.0]) - difficulty[:, None])))
    columns = np.where(p[:, 0] > 0.7, 0, np.where(p[:, 1] > 0.3, 1, 2))
    return float(p[np.arange(len(p)), columns].mean())


TRUE_VALUE = _true_value()


def test_a_good_model_narrows_the_interval_and_pairing_narrows_it_further() -> None:
    rng = np.random.default_rng(12)
    world = world_of(rng, 4000)
    plain = inverse_propensity(world.logged, bolder(world)).estimate
    robust = doubly_robust(world.logged, bolder(world)).estimate
    assert robust.high - robust.low < plain.high - plain.low
    paired = paired_difference(world.logged, bolder(world), world.serving).estimate
    serving = doubly_robust(world.logged, world.serving).estimate
    assert paired.high - paired.low < (robust.high - robust.low) + (serving.high - serving.low)
    assert paired.value == pytest.approx(robust.value - serving.value)


def test_known_outcomes_need_no_weights() -> None:
    rng = np.random.default_rng(13)
    world = world_of(rng, 3000)
    outcomes = (rng.random((3000, 3)) < world.p_right).astype(np.float64)
    chosen_outcome = outcomes[np.arange(3000), world.logged.chosen]
    everything = replace(world.logged, outcome=chosen_outcome, known=outcomes)
    target = bolder(world)
    found = doubly_robust(everything, target).estimate
    assert found.value == pytest.approx((target * outcomes).sum(axis=1).mean())
    blind = doubly_robust(replace(everything, known=None), target).estimate
    assert found.high - found.low < blind.high - blind.low


def test_a_policy_judged_on_its_own_log_gets_its_own_mean() -> None:
    rng = np.random.default_rng(14)
    logged = world_of(rng, 800).logged
    for estimator in (inverse_propensity, self_normalised):
        assert estimator(logged, logged.propensity).estimate.value == pytest.approx(logged.outcome.mean())
    assert self_normalised(logged, logged.propensity).effective_rows == pytest.approx(800)


def test_self_normalised_moves_with_a_constant() -> None:
    world = world_of(np.random.default_rng(15), 800)
    moved = replace(world.logged, outcome=world.logged.outcome + 5)
    target = bolder(world)
    assert self_normalised(moved, target).estimate.value == pytest.approx(
        self_normalised(world.logged, target).estimate.value + 5
    )


def test_tiers_the_log_never_tries_are_refused() -> None:
    world = world_of(np.random.default_rng(16), 400, share=0.0)
    with pytest.raises(ValueError, match="never tries"):
        doubly_robust(world.logged, bolder(world))


def test_malformed_logs_are_refused() -> None:
    logged = world_of(np.random.default_rng(17), 10).logged
    with pytest.raises(ValueError, match="outcome"):
        replace(logged, outcome=np.zeros(9))
    with pytest.raises(ValueError, match="propensities"):
        replace(logged, propensity=np.zeros((10, 3)))
    with pytest.raises(ValueError, match="weights"):
        replace(logged, weights=np.zeros(10))


def judged(rng: np.random.Generator, num_rows: int, candidate_of: object, rule: PromotionRule) -> PromotionVerdict:
    assert callable(candidate_of)
    world = world_of(rng, num_rows, share=0.2)
    cost = replace(world.logged, outcome=COSTS[world.logged.chosen], predicted=np.tile(COSTS, (num_rows, 1)))
    return judge_promotion(world.logged, cost, candidate_of(world), world.serving, rule).verdict


RULE = PromotionRule(quality_value_usd=0.01)


def test_a_worse_router_is_not_promoted_more_often_than_stated() -> None:
    """Sends hard requests down: cheaper, but not worth what it loses."""
    rng = np.random.default_rng(18)
    found = [judged(rng, 1500, lambda world: one_hot(world.serving.argmax(axis=1) // 2), RULE) for _ in range(60)]
    assert found.count(PromotionVerdict.PROMOTE) <= 3
    assert found.count(PromotionVerdict.KEEP) > 30


def test_an_equal_router_is_hardly_ever_promoted() -> None:
    rng = np.random.default_rng(19)
    assert judged(rng, 1500, lambda world: world.serving, RULE) is PromotionVerdict.INSUFFICIENT


def test_a_better_router_is_promoted_on_enough_rows_and_not_on_few() -> None:
    def best(world: World) -> np.ndarray:
        return one_hot((0.01 * world.p_right - COSTS).argmax(axis=1))

    rng = np.random.default_rng(20)
    found = [judged(rng, 20_000, best, RULE) for _ in range(5)]
    assert found.count(PromotionVerdict.PROMOTE) >= 4
    assert judged(rng, 60, best, RULE) is PromotionVerdict.INSUFFICIENT


@pytest.mark.parametrize(
    "bad",
    [
        {"quality_value_usd": -0.001},
        {"confidence": 1.0},
        {"confidence": 0.49},
        {"max_quality_loss": -0.01},
        {"max_quality_loss": 1.01},
        {"min_effective_rows": 1.99},
    ],
)
def test_rules_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        PromotionRule(**{"quality_value_usd": 0.01, **bad})


@pytest.mark.parametrize("max_quality_loss", [0.0, 1.0])
def test_rules_at_the_edge_are_taken(max_quality_loss: float) -> None:
    rule = PromotionRule(0.0, confidence=0.5, max_quality_loss=max_quality_loss, min_effective_rows=2)
    assert rule.max_quality_loss == max_quality_loss


def test_as_many_effective_rows_as_are_needed_are_enough() -> None:
    """A router judged on a log of its own choices has one effective row a decision."""
    world = world_of(np.random.default_rng(21), 50, share=0.0)
    enough, more = (replace(RULE, min_effective_rows=rows) for rows in (50, 51))
    few = judge_promotion(world.logged, world.logged, world.serving, world.serving, more)
    assert (few.effective_rows, few.verdict) == (50, PromotionVerdict.INSUFFICIENT)
    assert "50 effective rows" in few.reason
    assert (
        "not shown to be better"
        in judge_promotion(world.logged, world.logged, world.serving, world.serving, enough).reason
    )


@pytest.mark.parametrize(
    ("gained", "saved_usd", "verdict", "reason"),
    [
        (0.0, 0.125, PromotionVerdict.PROMOTE, "better by 0.125000 USD"),
        (0.5, 0.0, PromotionVerdict.PROMOTE, "better by 0.125000 USD"),
        (-0.125, 0.125, PromotionVerdict.PROMOTE, "better by 0.093750 USD"),
        (-0.25, 0.125, PromotionVerdict.INSUFFICIENT, "may lose 0.2500 of quality"),
        (0.25, -0.125, PromotionVerdict.KEEP, "worse by 0.062500 USD"),
        (0.25, -0.0625, PromotionVerdict.INSUFFICIENT, "not shown to be better"),
    ],
)
def test_what_is_known_for_certain_is_judged_by_its_worth(
    gained: float, saved_usd: float, verdict: PromotionVerdict, reason: str
) -> None:
    """The log tried both tiers alike, and what each was worth is known of every request."""
    chosen = np.array([0, 1] * 20)
    propensity = np.tile([0.5, 0.5], (40, 1))
    grades, paid_usd = np.tile([0.5 + gained, 0.5], (40, 1)), np.tile([0.25 - saved_usd, 0.25], (40, 1))
    quality = LoggedRows(chosen, propensity, grades[np.arange(40), chosen], known=grades)
    cost_usd = LoggedRows(chosen, propensity, paid_usd[np.arange(40), chosen], known=paid_usd)
    candidate, serving = np.tile([1.0, 0.0], (40, 1)), np.tile([0.0, 1.0], (40, 1))
    rule = PromotionRule(0.25, max_quality_loss=0.125, min_effective_rows=20)
    found = judge_promotion(quality, cost_usd, candidate, serving, rule)
    assert found.verdict is verdict
    assert reason in found.reason
    worth_usd = 0.25 * gained + saved_usd
    assert (found.quality, found.quality_low, found.cost_usd) == (gained, gained, -saved_usd)
    assert (found.worth_usd, found.worth_low_usd, found.worth_high_usd) == (worth_usd,) * 3
    assert found.effective_rows == 20
