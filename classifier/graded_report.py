"""Reports what routing over graded prompts would have bought, always beside the plain alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.curves import LadderCurve, PairCurve, fixed_mix_curve, mean_cost_quality, pair_curve
from classifier.evaluation import CurveOf, held_costs, held_intervals, length_estimates
from classifier.graded_table import GradedTable
from classifier.metrics import bootstrap_interval
from classifier.router_estimates import RouterEstimates
from classifier.rows import Floats, Ints

NUM_SETTINGS = 81
_LADDER_RESAMPLES = 50


def report_pair(table: GradedTable, found: RouterEstimates, *, seed: int, num_resamples: int = 200) -> dict[str, Any]:
    """Return RouteLLM's figures for the router, prompt length, chance and an oracle, as numbers for JSON.

    ``strong_share_95`` and ``_99`` are the least shares of strong calls that hold 95 and 99 % of the strong model's
    quality; for chance that is also the best fixed mix without a router. ``cost_usd_95`` and ``_99`` are what a request
    costs there, where every answer's cost is known. ``apgr_by_fold`` is the router's on each fold by itself.
    """
    weak, strong = table.scores.T
    gains = found.gains(0)
    rankings = {
        "router": gains,
        "length": table.lengths,
        "oracle": strong - weak,
        "random": np.zeros(len(table)),
        # Foreign prompts are the first to go up.
        "guarded": np.where(found.is_foreign, np.inf, gains),
    }
    figures: dict[str, dict[str, Any]] = {}
    for name, benefit in rankings.items():
        figures[name] = _pair_figures(pair_curve(benefit, weak, strong))
        if np.isfinite(table.costs_usd).all():
            for level in (95, 99):
                share = figures[name][f"strong_share_{level}"]
                figures[name][f"cost_usd_{level}"] = _cost_at(benefit, share, table.costs_usd)
    interval = bootstrap_interval(
        lambda rows: pair_curve(gains[rows], weak[rows], strong[rows]).apgr,
        table.groups,
        seed=seed,
        num_resamples=num_resamples,
    )
    figures["router"]["apgr_interval"] = [interval.low, interval.high]
    parts = [table.folds == fold for fold in np.unique(table.folds)]
    figures["router"]["apgr_by_fold"] = [pair_curve(gains[rows], weak[rows], strong[rows]).apgr for rows in parts]
    return {
        "num_prompts": len(table),
        "weak_quality": float(weak.mean()),
        "strong_quality": float(strong.mean()),
        "share_foreign": float(found.is_foreign.mean()),
        "rankings": figures,
    }


def _pair_figures(curve: PairCurve) -> dict[str, Any]:
    return {
        "apgr": curve.apgr,
        "cpt50": curve.share_recovering(0.5),
        "cpt80": curve.share_recovering(0.8),
        "strong_share_95": curve.share_holding(0.95),
        "strong_share_99": curve.share_holding(0.99),
    }


def _cost_at(benefit: Floats, share: float, costs_usd: Floats) -> float:
    """Return the mean cost when this share, highest benefit first, goes to the strong model; ties go by lot."""
    order = np.argsort(-benefit, kind="stable")
    extra = (costs_usd[:, 1] - costs_usd[:, 0])[order]
    _, block, sizes = np.unique(-benefit[order], return_inverse=True, return_counts=True)
    even = (np.bincount(block, weights=extra) / sizes)[block]
    return float(costs_usd[:, 0].mean() + even[: round(share * len(order))].sum() / len(order))


@dataclass(frozen=True, slots=True)
class PriceSweep:
    """Holds which model every setting chooses for every row, int64 (settings, n), from the dearest setting down."""

    chosen: Ints

    @classmethod
    def of(cls, estimates: Floats, costs: Floats) -> PriceSweep:
        """Put prices on quality: a row goes where price * estimate - mean cost is largest.

        Parameters
        ----------
        estimates : float64 (n, num_models)
        costs : float64 (num_models,), what an answer costs on average: a request's own cost is not known beforehand
        """
        prices = np.geomspace(costs.max() * 1e4, costs.max() * 1e-2, NUM_SETTINGS - 2)
        # The safest setting rests on no estimate: at any finite price a row of no estimated gain would stay below.
        top = np.full(len(estimates), len(costs) - 1)
        rows = [top, *(np.argmax(price * estimates - costs, axis=1) for price in (*prices, 0.0))]
        return cls(np.array(rows, dtype=np.int64))

    def guarded(self, is_foreign: NDArray[np.bool_], top: int) -> PriceSweep:
        """Return the same with foreign prompts at the top model, whatever the setting."""
        return PriceSweep(np.where(is_foreign[None, :], top, self.chosen))

    def curve(self, scores: Floats, costs_usd: Floats, rows: Ints) -> LadderCurve:
        """Return cost and quality on some rows."""
        points = [mean_cost_quality(chosen[rows], scores[rows], costs_usd[rows]) for chosen in self.chosen]
        cost, quality, shares = zip(*points, strict=True)
        return LadderCurve(np.array(cost), np.array(quality), np.array(shares))


def report_ladder(
    table: GradedTable, found: RouterEstimates, models: Sequence[str], *, seed: int, num_resamples: int
) -> dict[str, Any]:
    """Return dollars a request at which each way of choosing holds shares of the top model's quality.

    Every answer's cost must be known, see :meth:`GradedTable.require_costs`.
    """
    scores, costs = table.scores, table.costs_usd
    mean_costs = costs.mean(axis=0)
    folds = table.folds if table.folds.min() >= 0 else table.groups % 5
    router = PriceSweep.of(found.p_right, mean_costs)
    sweeps = {
        "router": router,
        "guarded": router.guarded(found.is_foreign, len(models) - 1),
        "length": PriceSweep.of(length_estimates(table.lengths, scores, folds), mean_costs),
        "oracle": PriceSweep.of(scores, mean_costs),
    }
    curves: dict[str, CurveOf] = {name: partial(sweep.curve, scores, costs) for name, sweep in sweeps.items()}
    curves["fixed_mix"] = lambda rows: fixed_mix_curve(scores[rows], costs[rows])
    rankings: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        held = held_costs(curve, scores, costs)
        rankings[name] = {f"cost_usd_{level}": share * float(mean_costs[-1]) for level, share in held.items()}
        rankings[name] |= {f"cost_share_{level}": share for level, share in held.items()}
    intervals = held_intervals(
        curves["router"], scores, costs, table.groups, seed=seed, num_resamples=min(num_resamples, _LADDER_RESAMPLES)
    )
    for level, interval in intervals.items():
        rankings["router"][f"cost_share_{level}_interval"] = [interval.low, interval.high]
    return {
        "num_prompts": len(table),
        "quality": scores.mean(axis=0).round(4).tolist(),
        "mean_cost_usd": mean_costs.tolist(),
        "share_foreign": float(found.is_foreign.mean()),
        "pairs": {model: _against_top(table, found, tier) for tier, model in enumerate(models[:-1])},
        "rankings": rankings,
    }


def _against_top(table: GradedTable, found: RouterEstimates, tier: int) -> dict[str, Any]:
    """Return RouteLLM's figures of a lower model against the top one, beside prompt length."""
    weak, top = table.scores[:, tier], table.scores[:, -1]
    return {
        **_pair_figures(pair_curve(found.gains(tier), weak, top)),
        "apgr_length": pair_curve(table.lengths, weak, top).apgr,
        "apgr_oracle": pair_curve(top - weak, weak, top).apgr,
    }
