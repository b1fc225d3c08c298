"""From a quality floor to the numbers a policy needs, at least cost on labelled traffic.

The estimates must not have been fitted on the labels they are judged by here (use held-out folds): otherwise the
derived numbers promise more than they keep. Searching many settings on one sample is itself a little optimistic; the
lower confidence bound that a setting must pass absorbs that at usual sample sizes, it does not prove it away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from policies.labelled_traffic import (
    FloatArray,
    IntArray,
    LabelledTraffic,
    Performance,
    choose_by_thresholds,
    choose_by_value,
    performance,
)

NUM_VALUES = 256
NUM_QUANTILES = 33
NUM_MULTIPLIERS = 64
MAX_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class DerivedValue:
    """A price of quality, and what routing by it did on the traffic it was derived from."""

    quality_value_usd: Decimal
    performance: Performance


@dataclass(frozen=True, slots=True)
class DerivedThresholds:
    """Least P(as good) per tier below the top, and what routing by it did on the traffic it was derived from."""

    thresholds: Mapping[int, float]
    performance: Performance


@dataclass(frozen=True, slots=True)
class Requirement:
    """States what is to be held: a floor, with a confidence, while a share of the traffic explores."""

    floor: float
    confidence: float = 0.95
    exploration_share: float = 0.0

    def measure(self, traffic: LabelledTraffic, chosen: IntArray) -> Performance:
        """Measure what a choice of one column a request would have done."""
        return performance(traffic, chosen, self.floor, self.confidence, self.exploration_share)


def derive_quality_value(traffic: LabelledTraffic, required: Requirement) -> DerivedValue:
    """Return the price of quality that holds the floor at least cost.

    Minimising cost under a bound on mean quality is, by its Lagrangian, choosing for each request the largest
    value * P(right) - cost with one value for all (Dekoninck et al. 2024, "A Unified Approach to Routing and
    Cascading for LLMs", section 3). Only the value is left to find.

    Returns
    -------
    The cheapest that holds; when none does, the one with the best margin, and ``performance.holds`` is False.
    """
    return min(
        (DerivedValue(_to_decimal(value), each) for value, each in cost_quality_curve(traffic, required)),
        key=lambda derived: _preference(derived.performance),
    )


def derive_thresholds(
    traffic: LabelledTraffic, required: Requirement, candidates: Sequence[Mapping[int, float]] | None = None
) -> DerivedThresholds:
    """Return the thresholds that hold the floor at least cost.

    Parameters
    ----------
    candidates : what :func:`candidate_thresholds` found on this traffic, when several floors share it

    Returns
    -------
    The cheapest that holds; when none does, the one with the best margin, and ``performance.holds`` is False.
    """
    tried = candidate_thresholds(traffic) if candidates is None else candidates
    found = (DerivedThresholds(each, required.measure(traffic, choose_by_thresholds(traffic, each))) for each in tried)
    return _trim(traffic, min(found, key=lambda derived: _preference(derived.performance)), required)


def candidate_thresholds(traffic: LabelledTraffic) -> list[dict[int, float]]:
    """Sets of thresholds worth considering, from the cheapest to the best; they do not depend on a floor.

    Coordinate ascent on mean quality - multiplier * mean cost, over a range of multipliers, each starting from the
    solution of the one before; beside them every common threshold.
    """
    grids = _grids(traffic)
    found = [dict.fromkeys(range(1, traffic.num_tiers), float(level)) for level in np.linspace(0.0, 1.0, 101)]
    current = dict.fromkeys(range(1, traffic.num_tiers), 1.0)
    for multiplier in _multipliers(traffic):
        current = _ascend(traffic, current, grids, multiplier)
        found.append(current)
    return found


def cost_quality_curve(
    traffic: LabelledTraffic, required: Requirement = Requirement(1.0), num_points: int = NUM_VALUES
) -> list[tuple[float, Performance]]:
    """(quality_value_usd, performance) from the cheapest routing to the best, at values where decisions change."""
    return [
        (value, required.measure(traffic, choose_by_value(traffic, value))) for value in _values(traffic, num_points)
    ]


def _values(traffic: LabelledTraffic, num_points: int) -> Sequence[float]:
    """Quantiles of the values at which some request is indifferent between two tiers, with both ends."""
    first, second = np.triu_indices(traffic.num_tiers, k=1)
    gained = traffic.p_right[:, second] - traffic.p_right[:, first]
    paid = traffic.cost_usd[:, second] - traffic.cost_usd[:, first]
    with np.errstate(divide="ignore", invalid="ignore"):
        indifferent = (paid / gained).ravel()
    indifferent = indifferent[np.isfinite(indifferent) & (indifferent > 0)]
    if indifferent.size == 0:
        return [0.0]
    levels = np.quantile(indifferent, np.linspace(0.0, 1.0, num_points))
    return [0.0, *np.unique(levels).tolist(), float(levels[-1] * 2)]


def _multipliers(traffic: LabelledTraffic) -> FloatArray:
    """From "cost is all" to "quality is all", in units of quality per dollar."""
    spread_usd = max(float(np.ptp(traffic.cost_usd.mean(axis=0))), 1e-12)
    return np.geomspace(100.0, 0.01, NUM_MULTIPLIERS) / spread_usd


def _ascend(
    traffic: LabelledTraffic, start: Mapping[int, float], grids: Sequence[FloatArray], multiplier: float
) -> dict[int, float]:
    current, best = dict(start), -np.inf
    for _ in range(MAX_SWEEPS):
        before = best
        for tier, grid in enumerate(grids, start=1):
            for level in grid:
                trial = {**current, tier: float(level)}
                gain = _objective(traffic, trial, multiplier)
                if gain > best:
                    current, best = trial, gain
        if best <= before:
            break
    return current


def _trim(traffic: LabelledTraffic, start: DerivedThresholds, required: Requirement) -> DerivedThresholds:
    """Move one threshold at a time while that costs less and the floor still holds.

    A multiplier finds only sets on the convex hull of cost and quality; the cheapest that holds may lie between.
    """
    best, grids = start, _grids(traffic)
    for _ in range(MAX_SWEEPS):
        before = best
        for tier, grid in enumerate(grids, start=1):
            for level in grid:
                trial = {**best.thresholds, tier: float(level)}
                measured = required.measure(traffic, choose_by_thresholds(traffic, trial))
                if _preference(measured) < _preference(best.performance):
                    best = DerivedThresholds(trial, measured)
        if best is before:
            break
    return best


def _objective(traffic: LabelledTraffic, thresholds: Mapping[int, float], multiplier: float) -> float:
    chosen = choose_by_thresholds(traffic, thresholds)
    rows = np.arange(len(chosen))
    gains = traffic.quality[rows, chosen] - multiplier * traffic.cost_usd[rows, chosen]
    return float(np.average(gains, weights=traffic.weights))


def _grids(traffic: LabelledTraffic) -> list[FloatArray]:
    return [_grid(traffic.p_as_good[:, column]) for column in range(traffic.num_tiers - 1)]


def _grid(levels: FloatArray) -> FloatArray:
    return np.unique([*np.quantile(levels, np.linspace(0.0, 1.0, NUM_QUANTILES)), 0.0, 1.0])


def _preference(found: Performance) -> tuple[float, ...]:
    """Order what holds before what does not; then the cheaper, or the nearer to holding."""
    return (0.0, found.cost_usd, -found.margin_low) if found.holds else (1.0, -found.margin_low, found.cost_usd)


def _to_decimal(value: float) -> Decimal:
    return Decimal(f"{value:.9g}")
