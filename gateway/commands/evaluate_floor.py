"""Certifies floors on samples of graded prompts, counts how often that was true, and says what is served without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.intervals import binomial_lower, is_mean_shown_below
from policies.judge_correction import prediction_powered

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_STEPS = 40
MAX_SAMPLE = 2000
FEW_LABELS = 400


@dataclass(frozen=True, slots=True)
class QualityGrid:
    """Holds what each setting of a fixed grid serves, the safest first: that one sends all to the strongest model.

    Attributes
    ----------
    chosen : int64 (settings, n), the model that each setting chooses for each row
    scores : float64 (n, num_models), the strongest model last
    p_right : float64 (n, num_models), the router's estimates of the scores
    """

    chosen: Ints
    scores: Floats
    p_right: Floats

    @classmethod
    def of_order(cls, order: Floats, scores: Floats, p_right: Floats) -> QualityGrid:
        """Send rows up by descending ``order``; the grid is made from the order alone, before grades are seen."""
        ranks = np.empty(len(order))
        ranks[np.argsort(-order, kind="stable")] = np.arange(len(order)) / len(order)
        shares = np.linspace(1.0, 0.0, NUM_STEPS + 1)
        return cls((ranks[None, :] < shares[:, None]).astype(np.int64), scores, p_right)

    def losses(self, values: Floats, step: int, floor: float, rows: Ints) -> Floats:
        """Return ``floor`` times the strongest model's value less the served one's, of some rows: -1 to ``floor``."""
        found: Floats = floor * values[rows, -1] - values[rows, self.chosen[step, rows]]
        return found

    def certified_step(self, rows: Ints, floor: float, confidence: float) -> int | None:
        """Return the cheapest setting that a sample shows to hold ``floor`` of the strongest model's quality, or None.

        Fixed-sequence testing from the safest setting, each by a bound that needs no more than grades in 0..1.
        """
        found = None
        for step in range(len(self.chosen)):
            loss = self.losses(self.scores, step, floor, rows)  # the floor is held where its mean is at most 0
            values, counts = np.unique((loss + 1.0) / (1.0 + floor), return_counts=True)
            if not is_mean_shown_below(np.clip(values, 0.0, 1.0), counts, 1.0 / (1.0 + floor), confidence):
                break
            found = step
        return found

    def powered_step(self, rows: Ints, rest: Ints, floor: float, confidence: float) -> int | None:
        """Return the same from few graded rows and the router's own estimates of many others (prediction-powered).

        By the central limit theorem, so for some hundred graded rows and more.
        """
        found = None
        for step in range(len(self.chosen)):
            loss = self.losses(self.scores, step, floor, rows)
            predicted, others = (self.losses(self.p_right, step, floor, each) for each in (rows, rest))
            if prediction_powered(loss, predicted, others, 2 * confidence - 1).high > 0.0:
                break
            found = step
        return found

    def holds(self, step: int, floor: float) -> bool:
        """Return whether all rows together hold the floor at a setting."""
        return float(self.losses(self.scores, step, floor, np.arange(len(self.scores))).mean()) <= 1e-12


def floor_report(
    grid: QualityGrid,
    cost_of: Callable[[int], float],
    *,
    floor: float,
    confidence: float,
    seed: int,
    num_resamples: int,
) -> dict[str, Any]:
    """Return the certificate on these rows, and its record over samples drawn from them, where the truth is known.

    Each sample stands for verified traffic: drawn with replacement from all rows, which are the population here. Few
    labels are drawn without, by themselves and with the router's estimates of the rest beside them.

    Parameters
    ----------
    cost_of : a setting's cost: the share of strong calls, or dollars a request
    """
    num_rows = len(grid.scores)
    step = grid.certified_step(np.arange(num_rows), floor, confidence)
    rng = np.random.default_rng(seed)
    size = min(num_rows, MAX_SAMPLE)
    steps = [grid.certified_step(rng.integers(0, num_rows, size), floor, confidence) for _ in range(num_resamples)]
    report = {
        "floor": floor,
        "confidence": confidence,
        "status": "insufficient" if step is None else "held",
        "cost": None if step is None else cost_of(step),
        "resamples": _record(grid, steps, size, floor, cost_of),
    }
    if num_rows >= 2 * FEW_LABELS:
        drawn = [np.split(rng.permutation(num_rows), [FEW_LABELS]) for _ in range(num_resamples)]
        plain = [grid.certified_step(few, floor, confidence) for few, _ in drawn]
        powered = [grid.powered_step(few, rest, floor, confidence) for few, rest in drawn]
        report["few_labels"] = _record(grid, plain, FEW_LABELS, floor, cost_of)
        report["prediction_powered"] = _record(grid, powered, FEW_LABELS, floor, cost_of)
    return report


def _record(
    grid: QualityGrid, steps: list[int | None], size: int, floor: float, cost_of: Callable[[int], float]
) -> dict[str, Any]:
    return {
        "count": len(steps),
        "sample_size": size,
        "share_honoured": float(np.mean([each is None or grid.holds(each, floor) for each in steps])),
        "share_insufficient": float(np.mean([each is None for each in steps])),
        "median_cost": float(np.median([cost_of(0 if each is None else each) for each in steps])),
    }


def guard_report(is_foreign: NDArray[np.bool_], familiar_share: float, confidence: float) -> dict[str, Any]:
    """Return whether traffic as a whole looks foreign: then all goes to the strongest model until checks certify less.

    It does where surely more than twice as many prompts are foreign as among familiar ones: the estimates were then
    made for something else.
    """
    num_foreign = int(is_foreign.sum())
    low = binomial_lower(num_foreign, len(is_foreign), confidence)
    foreign = low > 2 * familiar_share
    return {
        "share_foreign": num_foreign / len(is_foreign),
        "share_foreign_low": low,
        "is_foreign_traffic": foreign,
        "without_checks": "everything to the strongest model" if foreign else "routed, foreign prompts up",
    }
