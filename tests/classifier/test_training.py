"""A fitted router knows what can be known about a simulated ladder, on tasks it has not seen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from classifier.curves import fixed_mix_curve, ladder_curve
from classifier.errors import TrainingError
from classifier.evaluation import JudgedRows, evaluate
from classifier.folds import group_folds
from classifier.metrics import calibration_error, log_loss, roc_auc
from classifier.router import ArtifactRouter, cohere
from classifier.table import TrainingTable
from classifier.training import FittedRouter, fit_router
from classifier.types import RouterRequest, Sufficiency
from tests.classifier.conftest import SMALL
from tests.classifier.simulated_ladder import COSTS, draw, probabilities, request_of, table_of


def right_and_good(found: list[Sufficiency]) -> tuple[np.ndarray, np.ndarray]:
    right = np.array([[tier.p_right for tier in each.tiers] for each in found])
    return right, np.array([[tier.p_as_good for tier in each.tiers] for each in found])


def test_estimates_are_near_the_best_possible_on_fresh_tasks(router: ArtifactRouter) -> None:
    tasks, scores = draw(1500, seed=2, split="test")
    right, good = right_and_good(router.predict([request_of(task.prompt) for task in tasks]))
    truth = probabilities(tasks)
    for tier in range(3):
        outcome = scores[:, tier]
        best, base = log_loss(truth[:, tier], outcome), log_loss(np.full(1500, outcome.mean()), outcome)
        # At least two thirds of what can be known beyond the base rate.
        assert log_loss(right[:, tier], outcome) < base - (base - best) * 2 / 3
        assert roc_auc(right[:, tier], outcome) > roc_auc(truth[:, tier], outcome) - 0.06
        assert calibration_error(right[:, tier], outcome) < 0.06
        as_good = (outcome >= scores[:, -1]).astype(np.float64)
        assert calibration_error(good[:, tier], as_good) < 0.06


def test_routing_by_estimates_costs_far_less_than_any_mix(router: ArtifactRouter) -> None:
    tasks, scores = draw(1500, seed=3, split="test")
    right, _ = right_and_good(router.predict([request_of(task.prompt) for task in tasks]))
    wanted = 0.97 * scores[:, -1].mean()
    routed = ladder_curve(right, scores, COSTS).cost_holding(wanted)
    mixed = fixed_mix_curve(scores, COSTS).cost_holding(wanted)
    assert routed is not None
    assert mixed is not None
    assert routed < 0.6 * mixed
    assert routed < 0.45 * COSTS[-1]


def test_left_out_estimates_do_not_flatter(fitted: FittedRouter, table: TrainingTable, router: ArtifactRouter) -> None:
    tasks, scores = draw(1500, seed=2, split="test")
    fresh, _ = right_and_good(router.predict([request_of(task.prompt) for task in tasks]))
    for tier in range(3):
        reported = log_loss(fitted.p_right[:, tier], table.scores[:, tier])
        assert reported == pytest.approx(log_loss(fresh[:, tier], scores[:, tier]), abs=0.06)


@pytest.mark.slow
def test_same_seed_same_artifact(table: TrainingTable, fitted: FittedRouter) -> None:
    part = TrainingTable.build(table.requests[:150], table.scores[:150])
    one, two = (fit_router(part, seed=5, options=SMALL).artifact for _ in range(2))
    assert one.version == two.version
    assert fit_router(part, seed=6, options=SMALL).artifact.version != one.version
    assert fitted.artifact.version != one.version


def test_estimates_cohere(fitted: FittedRouter) -> None:
    right, good = fitted.p_right, fitted.p_as_good
    assert (good >= right - 1e-9).all()
    assert (good >= 1 - right[:, -1:] - 1e-9).all()
    assert (good <= right + 1 - right[:, -1:] + 1e-9).all()
    assert (good[:, -1] == 1).all()
    assert cohere(np.array([0.2, 0.9]), np.array([0.9, 1.0])) == pytest.approx([0.3, 1.0])


def test_groups_are_never_split() -> None:
    groups = np.random.default_rng(0).integers(0, 40, size=300)
    folds = group_folds(groups, 5, seed=0)
    assert all(len(set(folds[groups == g])) == 1 for g in set(groups))
    sizes = np.bincount(folds)
    assert len(sizes) == 5
    assert sizes.max() <= sizes.min() + np.bincount(groups).max()


def test_near_duplicates_do_not_inflate_what_is_reported() -> None:
    """Fifty wordings of noise, each twenty times with one coin's outcome: nothing can be known about a new one."""
    rng = np.random.default_rng(0)
    coins = rng.random((50, 2)) < 0.5
    requests = [request_of(f"item {chr(97 + i % 26)}{chr(97 + i // 26)} please") for i in range(50) for _ in range(20)]
    scores = np.repeat(coins, 20, axis=0).astype(np.float64)
    found = fit_router(TrainingTable.build(requests, scores), seed=0, options=SMALL)
    assert roc_auc(found.p_right[:, 0], scores[:, 0]) < 0.7
    blind = np.arange(1000)
    leaking = fit_router(TrainingTable.build(requests, scores, groups=blind), seed=0, options=SMALL)
    assert roc_auc(leaking.p_right[:, 0], scores[:, 0]) > 0.9  # what ignoring groups would have claimed


@pytest.mark.slow
def test_unobserved_outcomes_are_left_out_not_taken_for_wrong(table: TrainingTable) -> None:
    table = TrainingTable.build(table.requests[:900], table.scores[:900])
    scores = table.scores.copy()
    hidden = np.random.default_rng(0).random(scores.shape) < 0.5
    scores[hidden] = np.nan
    found = fit_router(dataclasses.replace(table, scores=scores), seed=0, options=SMALL)
    for tier in range(4):
        assert found.p_right[:, tier].mean() == pytest.approx(table.scores[:, tier].mean(), abs=0.05)
    assert roc_auc(found.p_right[:, 0], table.scores[:, 0]) > 0.8


@pytest.mark.slow
def test_weights_restore_a_population(table: TrainingTable) -> None:
    """A log that kept few of tier 1's failures, weighted by inverse inclusion, reads like the whole."""
    table = TrainingTable.build(table.requests[:900], table.scores[:900])
    keep = np.where(table.scores[:, 0] == 1, 1.0, 0.25)
    kept = np.flatnonzero(np.random.default_rng(0).random(len(keep)) < keep)
    part = TrainingTable.build([table.requests[i] for i in kept], table.scores[kept])
    weighted = dataclasses.replace(part, weights=1 / keep[kept])
    rate = table.scores[:, 0].mean()
    plain_mean, weighted_mean = (
        np.mean([each.tiers[0].p_right for each in ArtifactRouter(fitted.artifact).predict(table.requests)])
        for fitted in (fit_router(t, seed=0, options=SMALL) for t in (part, weighted))
    )
    assert weighted_mean == pytest.approx(rate, abs=0.07)
    assert plain_mean > rate + 0.15


def test_graded_scores_are_learned_as_means() -> None:
    rng = np.random.default_rng(0)
    requests = [request_of(("easy " if i % 2 else "hard ") + f"question {'x' * (i % 9)}{i}") for i in range(400)]
    scores = np.stack([np.where(np.arange(400) % 2, 0.8, 0.3) + rng.uniform(-0.1, 0.1, 400), np.full(400, 0.9)], axis=1)
    found = fit_router(TrainingTable.build(requests, scores, groups=np.arange(400)), seed=0, options=SMALL)
    assert found.p_right[1::2, 0].mean() == pytest.approx(0.8, abs=0.05)
    assert found.p_right[::2, 0].mean() == pytest.approx(0.3, abs=0.05)
    assert found.artifact.metadata["is_binary"] is False


def test_history_is_used_where_it_tells() -> None:
    """Tenants whose tier-1 history differs get different estimates for the same words."""
    rng = np.random.default_rng(0)
    skill = rng.choice([0.1, 0.9], size=800)
    requests = [
        RouterRequest(turns=(("user", f"job {'ab'[i % 2]} number {i}"),), history={1: (40 * s, 40.0)})
        for i, s in enumerate(skill)
    ]
    scores = np.stack([(rng.random(800) < skill).astype(np.float64), np.ones(800)], axis=1)
    found = fit_router(TrainingTable.build(requests, scores, groups=np.arange(800)), seed=0, options=SMALL)
    router = ArtifactRouter(found.artifact)
    turns = (("user", "job a number 999"),)
    good, bad = router.predict([RouterRequest(turns, history={1: (r, 40.0)}) for r in (36.0, 4.0)])
    assert good.tiers[0].p_right > 0.8 > 0.2 > bad.tiers[0].p_right


def test_a_metric_stands_beside_its_baselines(fitted: FittedRouter, table: TrainingTable) -> None:
    lengths = np.array([len(request.text) for request in table.requests], dtype=np.float64)
    judged = JudgedRows(
        p_right=fitted.p_right,
        p_as_good=fitted.p_as_good,
        scores=table.scores,
        costs=COSTS,
        lengths=lengths,
        groups=table.groups,
        folds=fitted.folds,
    )
    found = evaluate(judged, seed=0, num_resamples=30)
    pair, ladder = found["pair"], found["ladder"]
    assert pair["router"]["apgr"]["low"] > pair["length_fitted"]["apgr"]["high"] > 0.5
    assert pair["oracle"]["apgr"]["value"] > pair["router"]["apgr"]["high"]
    for share in ("95%", "97%", "99%"):
        held = [ladder[name][share] for name in ("oracle", "router", "length", "fixed_mix")]
        assert held == sorted(held)
        interval = ladder["router_interval"][share]
        assert interval["low"] <= ladder["router"][share] <= interval["high"] + 0.02
    assert found["tiers"][3]["share_right"] == pytest.approx(table.scores[:, 3].mean())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scores": np.full((100, 4), 2.0)}, "between 0 and 1"),
        ({"scores": np.full((100, 4), np.nan)}, "must be known"),
        ({"scores": np.zeros((99, 4))}, "shape"),
        ({"scores": np.zeros((100, 1))}, "num_tiers"),
        ({"weights": np.zeros(100)}, "above 0"),
        ({"weights": np.full(100, np.inf)}, "above 0"),
        ({"groups": np.zeros(5, dtype=np.int64)}, "groups"),
    ],
)
def test_a_bad_table_is_refused(change: dict[str, np.ndarray], problem: str) -> None:
    sound = table_of(*draw(100, seed=1))
    with pytest.raises(TrainingError, match=problem):
        dataclasses.replace(sound, **change)


def test_too_little_is_refused() -> None:
    with pytest.raises(TrainingError, match="too few"):
        table_of(*draw(10, seed=1))
    sound = table_of(*draw(100, seed=1))
    with pytest.raises(TrainingError, match="one group"):
        fit_router(dataclasses.replace(sound, groups=np.zeros(100, dtype=np.int64)), seed=0)
