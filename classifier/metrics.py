"""Measures a probability estimate against what happened, by numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.rows import Floats

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Interval:
    """Holds an estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return it for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def roc_auc(probabilities: Floats, outcomes: Floats) -> float:
    """Return the chance that a right one ranks above a wrong one, ties counted half; NaN where one class is missing."""
    positive = outcomes > 0.5
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    ranks = midranks(probabilities)
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def midranks(values: Floats) -> Floats:
    """Return ranks from 1, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts + 1) / 2)[inverse].astype(np.float64)


def brier(probabilities: Floats, outcomes: Floats) -> float:
    """Return the mean squared error of a probability."""
    return float(np.mean((probabilities - outcomes) ** 2))


def log_loss(probabilities: Floats, outcomes: Floats) -> float:
    """Return the mean negative log-likelihood in nats, probabilities kept ``1e-6`` away from certainty."""
    p = np.clip(probabilities, _EPSILON, 1 - _EPSILON)
    return float(-np.mean(outcomes * np.log(p) + (1 - outcomes) * np.log1p(-p)))


def calibration_error(probabilities: Floats, outcomes: Floats, num_bins: int = 15) -> float:
    """Return the expected calibration error over bins of equal population.

    References
    ----------
    Nixon et al. 2019, "Measuring Calibration in Deep Learning", section 3 (adaptive binning).
    """
    order = np.argsort(probabilities, kind="stable")
    bins = np.array_split(order, min(num_bins, max(len(order), 1)))
    gaps = [abs(float(probabilities[b].mean() - outcomes[b].mean())) * len(b) for b in bins if len(b)]
    return sum(gaps) / len(probabilities)


def bootstrap_interval(
    statistic: Callable[[NDArray[np.int64]], float],
    groups: NDArray[np.int64],
    *,
    seed: int,
    num_resamples: int = 200,
    confidence: float = 0.95,
) -> Interval:
    """Return the percentile interval of a statistic over resampled groups.

    Parameters
    ----------
    statistic : maps row numbers int64 (m,) to a number; NaN resamples are left out
    groups : int64 (n,), rows of one group are drawn together, since near-duplicates are not independent evidence
    seed : of the resampling
    num_resamples, confidence : precision and level of the interval

    References
    ----------
    Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    rows = np.arange(len(groups))
    order = np.argsort(groups, kind="stable")
    members = np.split(rows[order], np.flatnonzero(np.diff(groups[order])) + 1)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(num_resamples):
        picked = rng.integers(0, len(members), len(members))
        draws.append(statistic(np.concatenate([members[i] for i in picked])))
    tail = (1 - confidence) / 2
    # A resample may lack the statistic, such as a gap between two models that drew the same scores.
    low, high = np.nanquantile(draws, [tail, 1 - tail])
    return Interval(statistic(rows), float(low), float(high))


def without_nan(value: Any) -> Any:
    """Return the same nested figures with None for every number that is not finite, since JSON has none."""
    if isinstance(value, Mapping):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
