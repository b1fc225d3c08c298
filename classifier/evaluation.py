"""Judges a router on rows it had not seen, always beside the plain alternatives.

Every figure stands next to the same figure for prompt length alone, for chance, for the best mix without a router and
for an oracle that knows the outcomes, because a routing result without them says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from classifier.curves import LadderCurve, fixed_mix_curve, ladder_curve, pair_curve
from classifier.folds import fold_splits
from classifier.metrics import Interval, bootstrap_interval, brier, calibration_error, log_loss, roc_auc, without_nan
from classifier.rows import Floats, Ints, Rows

HELD_SHARES = (0.95, 0.97, 0.99)
_LENGTH_BINS = 20
_CURVE_SETTINGS = 61


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRows(Rows):
    """Holds estimates beside outcomes, one row a request.

    Attributes
    ----------
    p_right, p_as_good : float64 (n, num_tiers), made without having seen the row
    scores : float64 (n, num_tiers), 0..1, every tier known
    costs : float64 (n, num_tiers), USD; given as (num_tiers,) where every answer of a tier costs the same
    lengths : float64 (n,), characters of the prompt, for the baseline
    groups, folds : int64 (n,)
    """

    p_right: Floats
    p_as_good: Floats
    scores: Floats
    costs: Floats
    lengths: Floats
    groups: Ints
    folds: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", np.broadcast_to(self.costs, self.scores.shape))


def evaluate(judged: JudgedRows, *, seed: int, num_resamples: int = 200) -> dict[str, Any]:
    """Return all metrics as JSON-able numbers; NaN becomes None.

    Parameters
    ----------
    judged : estimates and outcomes
    seed : of the bootstrap
    num_resamples : of the bootstrap; intervals are 95 %
    """
    by_length = length_estimates(judged.lengths, judged.scores, judged.folds)
    found = {
        "num_rows": len(judged.scores),
        "tiers": [_tier_metrics(judged, by_length, tier) for tier in range(judged.scores.shape[1])],
        "pair": _pair_metrics(judged, by_length, seed, num_resamples),
        "ladder": _ladder_metrics(judged, by_length, seed, num_resamples),
    }
    cleaned: dict[str, Any] = without_nan(found)
    return cleaned


def length_estimates(lengths: Floats, scores: Floats, folds: Ints) -> Floats:
    """Return P(right) per tier from prompt length alone: left-out means of length bins, float64 (n, num_tiers)."""
    estimates = np.empty(scores.shape)
    for inside, outside in fold_splits(folds):
        edges = np.unique(np.quantile(lengths[inside], np.linspace(0, 1, _LENGTH_BINS + 1)[1:-1]))
        known, asked = np.searchsorted(edges, lengths[inside]), np.searchsorted(edges, lengths[outside])
        # Two rows' worth of the mean: a bin of one row must not speak of certainty.
        base = scores[inside].mean(axis=0)
        for each in np.unique(asked):
            rows = scores[inside[known == each]]
            estimates[outside[asked == each]] = (rows.sum(axis=0) + 2 * base) / (len(rows) + 2)
    return estimates


def _tier_metrics(judged: JudgedRows, by_length: Floats, tier: int) -> dict[str, Any]:
    right = judged.scores[:, tier]
    as_good = (right >= judged.scores[:, -1] - 1e-9).astype(np.float64)
    found = {
        "tier": tier + 1,
        "share_right": float(right.mean()),
        "right": _probability_metrics(judged.p_right[:, tier], right),
        "right_by_length": {"auc": roc_auc(by_length[:, tier], right), "log_loss": log_loss(by_length[:, tier], right)},
        "right_by_base_rate": {"auc": 0.5, "log_loss": log_loss(np.full(len(right), right.mean()), right)},
    }
    if tier < judged.scores.shape[1] - 1:
        found["share_as_good"] = float(as_good.mean())
        found["as_good"] = _probability_metrics(judged.p_as_good[:, tier], as_good)
    return found


def _probability_metrics(p: Floats, outcomes: Floats) -> dict[str, float]:
    return {
        "auc": roc_auc(p, outcomes),
        "log_loss": log_loss(p, outcomes),
        "brier": brier(p, outcomes),
        "ece": calibration_error(p, outcomes),
    }


def _pair_metrics(judged: JudgedRows, by_length: Floats, seed: int, num_resamples: int) -> dict[str, Any]:
    """Compare the lowest with the top tier, by estimated benefit, in RouteLLM's terms."""
    weak, strong = judged.scores[:, 0], judged.scores[:, -1]
    rankings = {
        "router": judged.p_right[:, -1] - judged.p_right[:, 0],
        "length": judged.lengths,
        "length_fitted": by_length[:, -1] - by_length[:, 0],
        "oracle": strong - weak,
    }
    found: dict[str, Any] = {"random": {"apgr": 0.5}}
    for name, benefit in rankings.items():
        curve = pair_curve(benefit, weak, strong)
        interval = bootstrap_interval(
            _apgr_of(benefit, weak, strong), judged.groups, seed=seed, num_resamples=num_resamples
        )
        found[name] = {
            "apgr": interval.as_dict(),
            "cpt50": curve.share_recovering(0.5),
            "cpt80": curve.share_recovering(0.8),
            "strong_share_95": curve.share_holding(0.95),
        }
    return found


def _apgr_of(benefit: Floats, weak: Floats, strong: Floats) -> Callable[[Ints], float]:
    return lambda rows: pair_curve(benefit[rows], weak[rows], strong[rows]).apgr


def _ladder_metrics(judged: JudgedRows, by_length: Floats, seed: int, num_resamples: int) -> dict[str, Any]:
    """Return the share of the top tier's cost at which each way of choosing holds shares of its quality."""
    scores, costs = judged.scores, judged.costs

    def curve_of(estimates: Floats) -> CurveOf:
        return lambda rows: ladder_curve(estimates[rows], scores[rows], costs[rows], num_settings=_CURVE_SETTINGS)

    curves: dict[str, CurveOf] = {
        "fixed_mix": lambda rows: fixed_mix_curve(scores[rows], costs[rows]),
        "router": curve_of(judged.p_right),
        "length": curve_of(by_length),
        "oracle": curve_of(scores),
    }
    found: dict[str, Any] = {name: held_costs(curve, scores, costs) for name, curve in curves.items()}
    found["top_quality"], found["top_cost_usd"] = float(scores[:, -1].mean()), float(costs.mean(axis=0)[-1])
    intervals = held_intervals(
        curves["router"], scores, costs, judged.groups, seed=seed, num_resamples=max(num_resamples // 4, 20)
    )
    found["router_interval"] = {share: interval.as_dict() for share, interval in intervals.items()}
    return found


CurveOf = Callable[[Ints], LadderCurve]
"""Given rows, cost and quality of a way of choosing on them."""


def held_costs(curve_of: CurveOf, scores: Floats, costs: Floats) -> dict[str, float]:
    """Return the share of the top tier's cost at which each of ``HELD_SHARES`` of its quality is held, NaN where none.

    Parameters
    ----------
    scores, costs : float64 (n, num_tiers)
    """
    rows = np.arange(len(scores))
    return {f"{share:.0%}": _held_cost(curve_of, scores, costs, share, rows) for share in HELD_SHARES}


def held_intervals(
    curve_of: CurveOf, scores: Floats, costs: Floats, groups: Ints, *, seed: int, num_resamples: int
) -> dict[str, Interval]:
    """Return the bootstrap intervals of :func:`held_costs` over groups."""
    return {
        f"{share:.0%}": bootstrap_interval(
            partial(_held_cost, curve_of, scores, costs, share), groups, seed=seed, num_resamples=num_resamples
        )
        for share in HELD_SHARES
    }


def _held_cost(curve_of: CurveOf, scores: Floats, costs: Floats, share: float, rows: Ints) -> float:
    held = curve_of(rows).cost_holding(share * float(scores[rows, -1].mean()))
    return float("nan") if held is None else held / float(costs[rows, -1].mean())
