"""What routing over a ladder of models would have cost and earned, in dollars, beside the plain alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.curves import LadderCurve, fixed_mix_curve, mean_cost_quality, pair_curve
from classifier.errors import TrainingError
from classifier.evaluation import Judged, length_estimates
from classifier.graded import GradedTable
from classifier.metrics import bootstrap_interval
from classifier.pair_model import MIN_ROWS
from classifier.pair_rows import Floats, Ints, PromptCounts
from classifier.score_model import ScoreModel

HELD_SHARES = (0.95, 0.97, 0.99)
NUM_SETTINGS = 81


@dataclass(frozen=True, slots=True)
class LadderEstimates:
    """Expected scores of rows a model had not seen, float64 (n, num_models), and which look foreign, bool (n,)."""

    scores: Floats
    is_foreign: NDArray[np.bool_]
    weights: Mapping[str, float]


def estimate_ladder(
    train: GradedTable, test: GradedTable, *, seed: int, counts: PromptCounts | None = None
) -> LadderEstimates:
    """Fit on one table, estimate another; groups they share are left out of training.

    ``counts`` are those of both tables' prompts, made here when not given.

    Raises
    ------
    TrainingError
        Too few rows are left.
    """
    apart = train.without_overlap(test)
    if len(apart) < MIN_ROWS:
        raise TrainingError(f"{len(apart)} training prompts share no group with the test set; {MIN_ROWS} are needed.")
    counts = counts or PromptCounts((*apart.rows.prompts, *test.rows.prompts))
    model = ScoreModel(apart.rows, counts, seed=seed)
    scores, similarity = model.estimates(test.rows.prompts)
    return LadderEstimates(scores, similarity < model.least_similarity, model.weights)


def cross_estimate_ladder(table: GradedTable, *, seed: int) -> LadderEstimates:
    """Every row estimated by a model fitted on the other folds of the data's own group-safe split.

    Raises
    ------
    TrainingError
        The rows carry no folds.
    """
    folds = np.unique(table.folds)
    if len(folds) < 2 or folds[0] < 0:
        raise TrainingError("The prompts carry no fold numbers; give different folders for --train and --test.")
    scores, foreign = np.zeros(table.rows.scores.shape), np.zeros(len(table), dtype=np.bool_)
    total: dict[str, float] = {}
    counts = PromptCounts(table.rows.prompts)
    for fold in folds:
        inside, outside = np.flatnonzero(table.folds != fold), np.flatnonzero(table.folds == fold)
        found = estimate_ladder(table.take(inside), table.take(outside), seed=seed, counts=counts)
        scores[outside], foreign[outside] = found.scores, found.is_foreign
        for name, weight in found.weights.items():
            total[name] = total.get(name, 0.0) + weight / len(folds)
    return LadderEstimates(scores, foreign, total)


@dataclass(frozen=True, slots=True)
class Swept:
    """Which model every setting chooses for every row, int64 (settings, n), from the dearest setting down."""

    chosen: Ints

    @classmethod
    def of(cls, estimates: Floats, costs: Floats) -> Swept:
        """Settings are prices put on quality; a row goes where value * estimate - mean cost is largest.

        Parameters
        ----------
        estimates : float64 (n, num_models)
        costs : float64 (num_models,), what an answer costs on average: a request's own cost is not known beforehand
        """
        values = np.concatenate(
            [[np.inf], np.geomspace(costs.max() * 1e4, costs.max() * 1e-2, NUM_SETTINGS - 2), [0.0]]
        )
        top = len(costs) - 1
        rows = [
            np.full(len(estimates), top) if np.isinf(v) else np.argmax(v * estimates - costs, axis=1) for v in values
        ]
        return cls(np.array(rows, dtype=np.int64))

    def guarded(self, is_foreign: NDArray[np.bool_], top: int) -> Swept:
        """Foreign prompts at the top model, whatever the setting."""
        return Swept(np.where(is_foreign[None, :], top, self.chosen))

    def curve(self, table: GradedTable, rows: Ints) -> LadderCurve:
        """Cost and quality on some rows."""
        scores, costs = table.rows.scores[rows], table.costs_usd[rows]
        points = [mean_cost_quality(chosen[rows], scores, costs) for chosen in self.chosen]
        cost, quality, shares = zip(*points, strict=True)
        return LadderCurve(np.array(cost), np.array(quality), np.array(shares))


def measure_ladder(
    table: GradedTable, found: LadderEstimates, models: Sequence[str], *, seed: int, num_resamples: int
) -> dict[str, Any]:
    """Dollars a request at which each way of choosing holds shares of the top model's quality, as JSON-able numbers.

    Raises
    ------
    TrainingError
        The cost of a model's answers is not known.
    """
    missing = [model for model, cost in zip(models, table.costs_usd.T, strict=True) if not np.isfinite(cost).all()]
    if missing:
        raise TrainingError(f"No cost is known for {', '.join(missing)}: give --price MODEL=IN,OUT, USD per Mtok.")
    mean_costs, all_rows = table.costs_usd.mean(axis=0), np.arange(len(table))
    top = len(models) - 1
    router = Swept.of(found.scores, mean_costs)
    sweeps = {
        "router": router,
        "guarded": router.guarded(found.is_foreign, top),
        "length": Swept.of(_by_length(table), mean_costs),
        "oracle": Swept.of(table.rows.scores, mean_costs),
    }
    curves = {name: each.curve(table, all_rows) for name, each in sweeps.items()}
    curves["fixed_mix"] = fixed_mix_curve(table.rows.scores, table.costs_usd)
    quality = float(table.rows.scores[:, -1].mean())
    rankings = {name: _held(curve, quality, float(mean_costs[-1])) for name, curve in curves.items()}
    for level in HELD_SHARES:
        interval = bootstrap_interval(
            partial(_share_at, router, table, level),
            table.rows.groups,
            seed=seed,
            num_resamples=min(num_resamples, 50),
        )
        rankings["router"][f"cost_share_{level:.0%}_interval"] = [_number(interval.low), _number(interval.high)]
    return {
        "num_prompts": len(table),
        "quality": table.rows.scores.mean(axis=0).round(4).tolist(),
        "mean_cost_usd": mean_costs.tolist(),
        "share_foreign": float(found.is_foreign.mean()),
        "votes": {name: round(weight, 5) for name, weight in sorted(found.weights.items())},
        "pairs": _pairs(table, found.scores, models),
        "rankings": rankings,
    }


def _pairs(table: GradedTable, estimates: Floats, models: Sequence[str]) -> dict[str, Any]:
    """RouteLLM's figure for every lower model against the top one, by the same estimates, beside prompt length."""
    lengths = np.array([float(len(prompt)) for prompt in table.rows.prompts])
    top, found = table.rows.scores[:, -1], {}
    for k, model in enumerate(models[:-1]):
        weak = table.rows.scores[:, k]
        curve = pair_curve(estimates[:, -1] - estimates[:, k], weak, top)
        found[model] = {
            "apgr": _number(curve.apgr),
            "apgr_length": _number(pair_curve(lengths, weak, top).apgr),
            "apgr_oracle": _number(pair_curve(top - weak, weak, top).apgr),
            "cpt50": curve.share_recovering(0.5),
            "cpt80": curve.share_recovering(0.8),
            "strong_share_95": curve.share_holding(0.95),
            "strong_share_99": curve.share_holding(0.99),
        }
    return found


def _held(curve: LadderCurve, quality: float, top_cost: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for level in HELD_SHARES:
        cost = curve.cost_holding(level * quality)
        found[f"cost_usd_{level:.0%}"] = cost
        found[f"cost_share_{level:.0%}"] = None if cost is None else cost / top_cost
    return found


def _share_at(swept: Swept, table: GradedTable, level: float, rows: Ints) -> float:
    cost = swept.curve(table, rows).cost_holding(level * float(table.rows.scores[rows, -1].mean()))
    return float("nan") if cost is None else cost / float(table.costs_usd[rows, -1].mean())


def _by_length(table: GradedTable) -> Floats:
    """Scores from prompt length alone, left-out means of length bins."""
    lengths = np.array([float(len(prompt)) for prompt in table.rows.prompts])
    folds = table.folds if table.folds.min() >= 0 else table.rows.groups % 5
    scores = table.rows.scores
    return length_estimates(
        Judged(
            p_right=scores,
            p_as_good=scores,
            scores=scores,
            costs=table.costs_usd,
            lengths=lengths,
            groups=table.rows.groups,
            folds=folds,
        )
    )


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
