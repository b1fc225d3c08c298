"""Bounds on the mean of bounded outcomes that hold at every sample size, and estimates with their intervals.

References
----------
Clopper and Pearson 1934, "The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial".
Waudby-Smith and Ramdas 2024, "Estimating Means of Bounded Random Variables by Betting", sections 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

_BISECTIONS = 50
# Shares of the largest stake; small stakes serve large samples, large ones small samples of rare faults.
_STAKES = np.concatenate([np.geomspace(1e-3, 0.5, 28), [0.6, 0.7, 0.8, 0.9, 0.95, 0.99]])


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def check_confidence(confidence: float) -> None:
    """Refuse what is no confidence.

    Raises
    ------
    ValueError
        Not strictly between 0 and 1.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence!r}; expected a number strictly between 0 and 1.")


def binomial_upper(num_hits: int, num_trials: int, confidence: float) -> float:
    """One-sided exact upper bound of a probability (Clopper and Pearson); 1 without trials."""
    _check_binomial(num_hits, num_trials, confidence)
    if num_hits == num_trials:
        return 1.0
    # The least p at which so few hits would be a surprise: P(X <= hits; p) = 1 - confidence.
    return _bisect(lambda p: _binomial_cdf(num_hits, num_trials, p) <= 1.0 - confidence)


def binomial_lower(num_hits: int, num_trials: int, confidence: float) -> float:
    """One-sided exact lower bound of a probability (Clopper and Pearson); 0 without trials."""
    return 1.0 - binomial_upper(num_trials - num_hits, num_trials, confidence)


def bounded_upper(values: ArrayLike, counts: ArrayLike, confidence: float) -> float:
    """Return upper bound of the mean of outcomes in [0, 1], whatever their distribution; valid at any stopping time.

    Parameters
    ----------
    values : float64 (k,), distinct or not, each in [0, 1]
    counts : (k,), how often each occurred; unsampled requests enter as the value 0
    confidence : one-sided

    Returns
    -------
    The least mean against which a fixed mixture of bets has grown ``1 / (1 - confidence)`` fold, or 1.

    Raises
    ------
    ValueError
        Values outside [0, 1], or shapes that disagree.
    """
    check_confidence(confidence)
    x, n = np.asarray(values, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if x.shape != n.shape or x.ndim != 1:
        raise ValueError(f"values and counts have the shapes {x.shape} and {n.shape}; expected one equal length.")
    if len(x) and not (np.isfinite(x).all() and x.min() >= 0.0 and x.max() <= 1.0):
        raise ValueError("values must lie in [0, 1].")
    needed = -math.log1p(-confidence)
    return _bisect(lambda mean: _log_capital(x, n, mean) >= needed)


def _log_capital(x: FloatArray, counts: FloatArray, mean: float) -> float:
    """Log capital of betting that the true mean lies below ``mean``: a martingale or less where it does not."""
    # A stake of 1 / (1 - mean) would be ruined by a single outcome of 1.
    stakes = _STAKES / max(1.0 - mean, 1e-12)
    grown = np.log1p(np.maximum(stakes[:, None] * (mean - x), -1.0 + 1e-12)) @ counts
    peak = float(grown.max())
    return peak + math.log(float(np.exp(grown - peak).mean()))


def is_mean_shown_below(values: ArrayLike, counts: ArrayLike, mean: float, confidence: float) -> bool:
    """Return whether :func:`bounded_upper` lies at or below ``mean``, without searching for it."""
    check_confidence(confidence)
    x, n = np.asarray(values, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    return mean < 1.0 and _log_capital(x, n, mean) >= -math.log1p(-confidence)


def skewed_interval(rows: FloatArray, confidence: float) -> Estimate:
    """Return interval of a mean whose rows are skewed, as inverse-probability weighted rows are.

    Parameters
    ----------
    rows : float64 (n,), independent, at least 2
    confidence : two-sided

    References
    ----------
    Hall 1992, "On the Removal of Skewness by Transformation", section 2.
    """
    check_confidence(confidence)
    n = len(rows)
    if n < 2:
        raise ValueError(f"An interval needs 2 rows or more, not {n}.")
    mean, deviation = float(rows.mean()), float(rows.std(ddof=1))
    if deviation <= 1e-12 * max(abs(mean), 1e-300):
        return Estimate(mean, mean, mean)
    standard = (rows - mean) / deviation
    skewness = float((standard**3).mean()) / math.sqrt(n)
    # A deviation estimated from few large rows is itself uncertain: as many degrees of freedom as its kurtosis leaves.
    freedom = 2 * n / max(float((standard**4).mean()) - 1.0, 1.0)
    z = _student(NormalDist().inv_cdf(0.5 + confidence / 2), freedom)
    error = deviation / math.sqrt(n)
    # The transformation moves both ends; neither is allowed to come nearer than the plain interval's.
    below, above = max(z, _unskew(z, skewness)), max(z, -_unskew(-z, skewness))
    return Estimate(mean, mean - error * below, mean + error * above)


def _student(z: float, freedom: float) -> float:
    """Student's quantile for the normal quantile ``z``, by its expansion (Abramowitz and Stegun 26.7.5)."""
    freedom = max(freedom, 3.0)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _unskew(z: float, skewness: float) -> float:
    """Hall's inverse transformation; ``skewness`` already divided by the root of n."""
    if abs(skewness) < 1e-9:
        return z
    return 3 / skewness * (float(np.cbrt(1 + skewness * (z - skewness / 6))) - 1)


def _check_binomial(num_hits: int, num_trials: int, confidence: float) -> None:
    check_confidence(confidence)
    if not 0 <= num_hits <= num_trials:
        raise ValueError(f"{num_hits} hits of {num_trials} trials cannot be.")


def _binomial_cdf(num_hits: int, num_trials: int, p: float) -> float:
    """Return P(X <= num_hits) for 0 < p < 1; the ends are never asked for."""
    k = np.arange(num_hits + 1)
    # Log binomial coefficients by the recurrence C(n, k) = C(n, k-1) (n - k + 1) / k.
    steps = np.log((num_trials - k[1:] + 1) / k[1:])
    logs = np.concatenate([[0.0], np.cumsum(steps)]) + k * math.log(p) + (num_trials - k) * math.log1p(-p)
    return float(np.exp(logs).sum())


def _bisect(is_rejected: Callable[[float], bool]) -> float:
    """Return least number in [0, 1] that is rejected, given that all above a rejected one are; 1 when none is.

    Only numbers between the ends are tried.
    """
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if is_rejected(middle):
            high = middle
        else:
            low = middle
    return high
