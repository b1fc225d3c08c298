"""What a sample of graded prompts certifies, how often the certificate was true, and what is served without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.debias import prediction_powered
from policies.intervals import binomial_lower, is_mean_shown_below

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_STEPS = 40
MAX_SAMPLE = 2000
FEW_LABELS = 400
FAMILIAR_FOREIGN_SHARE = 0.10
"""Twice the share of familiar prompts that the guard takes for foreign."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Quality at each setting of a fixed grid, float64 (settings, n), the safest first; the first is all strong.

    Attributes
    ----------
    quality : of what each setting serves
    strong : float64 (n,), of the strongest model
    predicted : float64 (settings, n), what the estimates promise ``floor * strong - quality`` to be, given a floor;
        None where nothing is promised
    """

    quality: Floats
    strong: Floats
    predicted: Callable[[float], Floats] | None = None

    @classmethod
    def of(cls, order: Floats, weak: Floats, strong: Floats) -> Routed:
        """Rows sent up by descending ``order``; the grid is made from the order alone, before grades are seen."""
        ranks = np.empty(len(order))
        ranks[np.argsort(-order, kind="stable")] = np.arange(len(order)) / len(order)
        shares = np.linspace(1.0, 0.0, NUM_STEPS + 1)
        goes_up = ranks[None, :] < shares[:, None]
        usual = np.where(np.isfinite(order), order, np.nan)
        gains = np.nan_to_num(usual, nan=float(np.nanmax(usual)) if np.isfinite(usual).any() else 0.0)
        return cls(
            np.where(goes_up, strong, weak), strong, lambda floor: np.where(goes_up, floor - 1.0, floor - 1.0 + gains)
        )

    @classmethod
    def of_ladder(cls, chosen: Ints, scores: Floats) -> Routed:
        """Settings as the model that each chooses for each row, int64 (settings, n); the last one is the strongest."""
        return cls(scores[np.arange(len(scores))[None, :], chosen], scores[:, -1])

    def certified_step(self, rows: Ints, floor: float, confidence: float) -> int | None:
        """The cheapest setting that a sample shows to hold ``floor`` of the strongest model's quality; None: not one.

        Fixed-sequence testing from the safest setting, each by a bound that needs no more than grades in 0..1.
        """
        found = None
        for step in range(len(self.quality)):
            loss = floor * self.strong[rows] - self.quality[step, rows]  # in -1 .. floor; held when the mean is <= 0
            values, counts = np.unique((loss + 1.0) / (1.0 + floor), return_counts=True)
            if not is_mean_shown_below(np.clip(values, 0.0, 1.0), counts, 1.0 / (1.0 + floor), confidence):
                break
            found = step
        return found

    def powered_step(self, rows: Ints, rest: Ints, floor: float, confidence: float) -> int | None:
        """The same from few graded rows and the router's own estimates of many others (prediction-powered).

        By the central limit theorem, so for some hundred graded rows and more.
        """
        if self.predicted is None:
            return None
        found, predicted = None, self.predicted(floor)
        for step in range(len(self.quality)):
            loss = floor * self.strong[rows] - self.quality[step, rows]
            bound = prediction_powered(loss, predicted[step, rows], predicted[step, rest], 2 * confidence - 1)
            if bound.high > 0.0:
                break
            found = step
        return found

    def holds(self, step: int, floor: float) -> bool:
        """Whether all rows together hold the floor at a setting."""
        return bool(self.quality[step].mean() >= floor * self.strong.mean() - 1e-12)


def floor_report(
    routed: Routed, cost_of: Callable[[int], float], *, floor: float, confidence: float, seed: int, num_resamples: int
) -> dict[str, Any]:
    """The certificate on these rows, and its record over samples drawn from them, where the truth is known.

    Each sample stands for verified traffic: drawn with replacement from all rows, which are the population here.

    Parameters
    ----------
    cost_of : a setting's cost: the share of strong calls, or dollars a request
    """
    num_rows = len(routed.strong)
    step = routed.certified_step(np.arange(num_rows), floor, confidence)
    rng = np.random.default_rng(seed)
    size = min(num_rows, MAX_SAMPLE)
    steps = [routed.certified_step(rng.integers(0, num_rows, size), floor, confidence) for _ in range(num_resamples)]
    return {
        "floor": floor,
        "confidence": confidence,
        "status": "insufficient" if step is None else "held",
        "cost": None if step is None else cost_of(step),
        "resamples": _record(routed, steps, size, floor, cost_of),
        **_powered(routed, cost_of, floor, confidence, rng, num_resamples),
    }


def _powered(
    routed: Routed,
    cost_of: Callable[[int], float],
    floor: float,
    confidence: float,
    rng: np.random.Generator,
    num_resamples: int,
) -> dict[str, Any]:
    """What few labels certify, by themselves and with the router's estimates of the rest beside them."""
    num_rows = len(routed.strong)
    if routed.predicted is None or num_rows < 2 * FEW_LABELS:
        return {}
    plain: list[int | None] = []
    powered: list[int | None] = []
    for _ in range(num_resamples):
        drawn = rng.permutation(num_rows)
        few, rest = drawn[:FEW_LABELS], drawn[FEW_LABELS:]
        plain.append(routed.certified_step(few, floor, confidence))
        powered.append(routed.powered_step(few, rest, floor, confidence))
    return {
        "few_labels": _record(routed, plain, FEW_LABELS, floor, cost_of),
        "prediction_powered": _record(routed, powered, FEW_LABELS, floor, cost_of),
    }


def _record(
    routed: Routed, steps: list[int | None], size: int, floor: float, cost_of: Callable[[int], float]
) -> dict[str, Any]:
    if not steps:
        return {"count": 0}
    return {
        "count": len(steps),
        "sample_size": size,
        "share_honoured": float(np.mean([each is None or routed.holds(each, floor) for each in steps])),
        "share_insufficient": float(np.mean([each is None for each in steps])),
        "median_cost": float(np.median([cost_of(0) if each is None else cost_of(each) for each in steps])),
    }


def guard_report(is_foreign: NDArray[np.bool_], confidence: float) -> dict[str, Any]:
    """Whether traffic as a whole looks foreign: then everything goes to the strongest model until checks certify less.

    Of familiar traffic the guard takes one prompt in twenty for foreign; where it surely takes more than twice as many,
    the estimates were made for something else.
    """
    num_foreign = int(is_foreign.sum())
    low = binomial_lower(num_foreign, len(is_foreign), confidence)
    foreign = low > FAMILIAR_FOREIGN_SHARE
    return {
        "share_foreign": num_foreign / len(is_foreign),
        "share_foreign_low": low,
        "is_foreign_traffic": foreign,
        "without_checks": "everything to the strongest model" if foreign else "routed, foreign prompts up",
    }
