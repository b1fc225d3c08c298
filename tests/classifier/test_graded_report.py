"""What routing would have bought is counted as a plain program counts it, beside every alternative."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier.curves import fixed_mix_curve, mean_cost_quality
from classifier.errors import TrainingError
from classifier.graded_report import PriceSweep, report_ladder, report_pair
from classifier.graded_table import GradedTable
from classifier.router_estimates import RouterEstimates
from classifier.rows import Floats
from classifier.types import RouterRequest

COUNT = 300


def graded(scores: Floats, costs: Floats) -> GradedTable:
    names = tuple(f"p{number}" for number in range(len(scores)))
    prompts = tuple("x" * (number % 7 + 1) for number in range(len(scores)))
    return GradedTable(
        prompts=prompts,
        requests=tuple(RouterRequest((("user", prompt),)) for prompt in prompts),
        scores=scores,
        costs_usd=np.broadcast_to(costs, scores.shape),
        folds=np.arange(len(scores)) % 5,
        benchmarks=("b",) * len(scores),
        group_names=names,
        prompt_ids=names,
    )


def said(p_right: Floats, is_foreign: np.ndarray | None = None) -> RouterEstimates:
    count = len(p_right)
    return RouterEstimates(
        p_right=p_right,
        p_as_good=p_right,
        is_foreign=np.zeros(count, dtype=np.bool_) if is_foreign is None else is_foreign,
        familiar_share=np.full(count, 0.005),
        router_ids=np.zeros(count, dtype=np.int64),
    )


def drawn(seed: int, levels: tuple[float, ...]) -> Floats:
    """Scores of models that are right more and more often."""
    return (np.random.default_rng(seed).random((COUNT, len(levels))) < levels).astype(np.float64)


def test_who_knows_the_grades_is_the_oracle_and_who_knows_nothing_is_chance() -> None:
    scores = drawn(0, (0.5, 0.9))
    table = graded(scores, np.array([1.0, 10.0]))
    knowing = report_pair(table, said(scores), seed=0, num_resamples=5)["rankings"]
    assert knowing["router"]["apgr"] == knowing["oracle"]["apgr"] > 0.8
    blind = report_pair(table, said(np.full(scores.shape, 0.5)), seed=0, num_resamples=5)["rankings"]
    assert blind["router"]["apgr"] == blind["random"]["apgr"] == pytest.approx(0.5)


def test_costs_are_those_of_the_calls_that_are_sent() -> None:
    """The strong model is needed by known rows; each of them costs what it costs, not the mean."""
    weak = np.r_[np.zeros(20), np.ones(80)]
    scores, costs = np.stack([weak, np.ones(100)], axis=1), np.ones((100, 2))
    costs[:, 1] = np.r_[np.full(20, 2.0), np.full(80, 9.0)]
    found = report_pair(graded(scores, costs), said(scores), seed=0, num_resamples=5)["rankings"]["router"]
    # 95 of 100 are right once 15 of the 20 have gone up.
    assert found["strong_share_95"] == 0.15
    assert found["cost_usd_95"] == pytest.approx((100 + 15 * 1.0) / 100)


def test_of_equal_gains_a_call_costs_the_mean_of_them() -> None:
    scores = np.stack([np.zeros(10), np.ones(10)], axis=1)
    costs = np.stack([np.zeros(10), np.arange(10.0)], axis=1)
    found = report_pair(graded(scores, costs), said(np.full((10, 2), 0.5)), seed=0, num_resamples=5)
    assert found["rankings"]["router"]["strong_share_95"] == 1.0
    half = graded(np.stack([np.r_[np.zeros(5), np.ones(5)], np.ones(10)], axis=1), costs)
    blind = report_pair(half, said(np.full((10, 2), 0.5)), seed=0, num_resamples=5)["rankings"]["random"]
    assert blind["cost_usd_95"] == pytest.approx(blind["strong_share_95"] * 4.5)


def test_an_unknown_cost_leaves_dollars_out_of_a_pair_and_refuses_a_ladder() -> None:
    scores = drawn(1, (0.5, 0.7, 0.9))
    costs = np.ones((COUNT, 3))
    costs[4, 1] = np.nan
    pair = graded(scores[:, :2], costs[:, :2])
    assert "cost_usd_95" not in report_pair(pair, said(scores[:, :2]), seed=0, num_resamples=5)["rankings"]["router"]
    with pytest.raises(TrainingError, match="for middle: give --price"):
        graded(scores, costs).require_costs(("low", "middle", "top"))


def test_foreign_prompts_go_up_first_and_always() -> None:
    scores = np.stack([np.r_[np.zeros(30), np.ones(70)], np.ones(100)], axis=1)
    is_foreign = np.arange(100) >= 90  # the weak model is right about all of them
    table = graded(scores, np.array([1.0, 10.0]))
    found = report_pair(table, said(scores, is_foreign), seed=0, num_resamples=5)
    ranks = found["rankings"]
    assert found["share_foreign"] == 0.1
    assert ranks["guarded"]["strong_share_95"] == pytest.approx(ranks["router"]["strong_share_95"] + 0.1)
    chosen = PriceSweep.of(scores, np.array([1.0, 10.0])).guarded(is_foreign, 1).chosen
    assert (chosen[:, is_foreign] == 1).all()
    assert (chosen[-1, ~is_foreign] == 0).all()


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_a_sweep_runs_from_the_top_model_to_the_cheapest(seed: int, num_models: int) -> None:
    rng = np.random.default_rng(seed)
    estimates, costs = rng.random((12, num_models)), np.sort(rng.random(num_models)) + 0.01
    sweep = PriceSweep.of(estimates, costs)
    assert (sweep.chosen[0] == num_models - 1).all()
    assert (sweep.chosen[-1] == 0).all()
    # From the second setting on less is paid for quality: never a dearer model, never a better estimate.
    spent, hoped = costs[sweep.chosen[1:]], np.take_along_axis(estimates, sweep.chosen[1:].T, axis=1).T
    assert (np.diff(spent, axis=0) <= 1e-12).all()
    assert (np.diff(hoped, axis=0) <= 1e-12).all()


@given(st.integers(0, 2**32 - 1))
def test_a_curve_on_some_rows_is_that_of_those_rows_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimates, scores, costs = (rng.random((15, 3)) for _ in range(3))
    sweep, rows = PriceSweep.of(estimates, costs.mean(axis=0)), rng.integers(0, 15, 9)
    curve = sweep.curve(scores, costs, rows)
    place = int(rng.integers(len(sweep.chosen)))
    cost, quality, shares = mean_cost_quality(sweep.chosen[place, rows], scores[rows], costs[rows])
    assert (curve.cost[place], curve.quality[place]) == pytest.approx((cost, quality))
    assert curve.shares[place] == pytest.approx(shares)


def test_a_ladder_of_known_grades_costs_less_than_any_mix() -> None:
    scores, costs = drawn(2, (0.4, 0.7, 0.95)), np.array([1.0, 4.0, 20.0])
    table = graded(scores, costs)
    found = report_ladder(table, said(scores), ("low", "middle", "top"), seed=0, num_resamples=10)
    ranks, mix = found["rankings"], fixed_mix_curve(scores, table.costs_usd)
    for level in (0.95, 0.97, 0.99):
        key = f"cost_share_{level:.0%}"
        assert ranks["router"][key] == ranks["oracle"][key] < 0.5 * ranks["fixed_mix"][key]
        expected = mix.cost_holding(level * float(scores[:, -1].mean()))
        assert ranks["fixed_mix"][f"cost_usd_{level:.0%}"] == pytest.approx(expected)
        low, high = ranks["router"][f"{key}_interval"]
        assert low <= ranks["router"][key] <= high
    assert found["mean_cost_usd"] == costs.tolist()
    assert found["pairs"]["middle"]["apgr"] == found["pairs"]["middle"]["apgr_oracle"]
