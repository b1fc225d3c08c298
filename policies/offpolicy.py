"""Estimates what another router would have earned, from the log alone.

Every logged decision carries the probability with which it was made. A row whose tier the other router would also have
chosen is weighed by the inverse of that; a model of outcomes, where there is one, fills in for the rest and is
corrected where it can be. Nothing is said about tiers that the log never tries: their propensity is zero, and such rows
are refused rather than guessed.

References
----------
Horvitz and Thompson 1952. Swaminathan and Joachims 2015, "The Self-Normalized Estimator for Counterfactual Learning".
Dudík, Langford and Li 2011, "Doubly Robust Policy Evaluation and Learning".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.intervals import Estimate, FloatArray, skewed_interval

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoggedRows:
    """Decisions and what came of them.

    Parameters
    ----------
    chosen : int64 (n,), column of the tier that answered
    propensity : float64 (n, T), probability the logging policy gave each tier for this request; 0 where not permitted
    outcome : float64 (n,), what the chosen tier's answer was worth: a grade, or dollars
    predicted : float64 (n, T), a model's guess of every tier's outcome, made without these rows; zeros when not given
    known : float64 (n, T), outcomes that are known without having been chosen (both arms of a checked answer), NaN
        elsewhere; they replace the weighted ones
    weights : float64 (n,), inverse probability of the outcome having been graded; equal when not given
    """

    chosen: IntArray
    propensity: FloatArray
    outcome: FloatArray
    predicted: FloatArray | None = None
    known: FloatArray | None = None
    weights: FloatArray | None = None

    def __post_init__(self) -> None:
        shape = self.propensity.shape
        if len(shape) != 2 or shape[0] < 2:
            raise ValueError(f"propensity has the shape {shape}; expected (rows, tiers) with 2 rows or more.")
        for name, array, expected in (
            ("chosen", self.chosen, shape[:1]),
            ("outcome", self.outcome, shape[:1]),
            ("predicted", self.predicted, shape),
            ("known", self.known, shape),
            ("weights", self.weights, shape[:1]),
        ):
            if array is not None and array.shape != expected:
                raise ValueError(f"{name} has the shape {array.shape}; expected {expected}.")
        taken = self.propensity[np.arange(len(self.chosen)), self.chosen]
        if not (taken > 0).all() or self.propensity.max() > 1 + 1e-9 or self.propensity.min() < 0:
            raise ValueError("propensities must lie in 0..1 and be above 0 for what was chosen.")
        if self.weights is not None and not (np.isfinite(self.weights).all() and (self.weights > 0).all()):
            raise ValueError("weights must be numbers above 0.")

    @property
    def taken(self) -> FloatArray:
        """Propensity of what was chosen, float64 (n,)."""
        return self.propensity[np.arange(len(self.chosen)), self.chosen]


@dataclass(frozen=True, slots=True)
class OffPolicyEstimate:
    """An off-policy estimate.

    ``effective_rows`` is how many rows of the target policy's own the evidence is worth (Kish); ``max_weight`` the
    largest weight of a row.
    """

    estimate: Estimate
    effective_rows: float
    max_weight: float


def inverse_propensity(logged: LoggedRows, target: FloatArray, confidence: float = 0.95) -> OffPolicyEstimate:
    """IPS: unbiased, and wide where the target seldom agrees with the log.

    Parameters
    ----------
    logged : the log
    target : float64 (n, T), probabilities of the policy to be judged; rows sum to 1
    confidence : two-sided
    """
    ratio = _ratio(logged, target)
    return _evaluated(ratio, skewed_interval(_scaled(logged, ratio * logged.outcome), confidence))


def self_normalised(logged: LoggedRows, target: FloatArray, confidence: float = 0.95) -> OffPolicyEstimate:
    """SNIPS: the weighted mean; a little biased on few rows, and unmoved by adding a constant to every outcome."""
    ratio = _ratio(logged, target) * _weights(logged)
    total = float(ratio.sum())
    if total <= 0.0:
        raise ValueError("The target policy agrees with no logged decision; nothing can be said about it.")
    value = float(ratio @ logged.outcome) / total
    residual = ratio * (logged.outcome - value) / (total / len(ratio))
    spread = skewed_interval(residual, confidence)
    return _evaluated(ratio, Estimate(value, value + spread.low, value + spread.high))


def doubly_robust(logged: LoggedRows, target: FloatArray, confidence: float = 0.95) -> OffPolicyEstimate:
    """DR: right when either the propensities or the model of outcomes are, and narrow when both are good."""
    rows = doubly_robust_rows(logged, target)
    return _evaluated(_ratio(logged, target), skewed_interval(rows, confidence))


def paired_difference(
    logged: LoggedRows, target: FloatArray, serving: FloatArray, confidence: float = 0.95
) -> OffPolicyEstimate:
    """Target less serving policy on the same rows: what makes requests easy or hard cancels out.

    Where the two policies agree a row adds nothing but the knowledge that it does not matter.
    """
    rows = doubly_robust_rows(logged, target) - doubly_robust_rows(logged, serving)
    return _evaluated(_ratio(logged, target), skewed_interval(rows, confidence))


def doubly_robust_rows(logged: LoggedRows, target: FloatArray) -> FloatArray:
    """Return each row's unbiased share of the target's value, float64 (n,); its mean is the estimate."""
    predicted = logged.predicted if logged.predicted is not None else np.zeros(logged.propensity.shape)
    rows = np.arange(len(logged.chosen))
    error = logged.outcome - predicted[rows, logged.chosen]
    corrections = _ratio(logged, target) * error
    if logged.known is not None:
        corrections = np.where(_all_known(logged), _known_correction(logged, target, predicted), corrections)
    return _scaled(logged, (target * predicted).sum(axis=1) + corrections)


def _known_correction(logged: LoggedRows, target: FloatArray, predicted: FloatArray) -> FloatArray:
    assert logged.known is not None
    correction: FloatArray = (target * np.nan_to_num(logged.known - predicted)).sum(axis=1)
    return correction


def _all_known(logged: LoggedRows) -> NDArray[np.bool_]:
    """Return rows whose every permitted tier has a known outcome: there nothing needs weighting.

    Whether a row is so must not depend on the tier that was drawn, or the weighted rows beside it are no longer
    unbiased; a check that is drawn whatever tier answered satisfies that.
    """
    assert logged.known is not None
    settled = ~np.isnan(logged.known) | (logged.propensity <= 0)
    return np.asarray(settled.all(axis=1), dtype=np.bool_)


def _ratio(logged: LoggedRows, target: FloatArray) -> FloatArray:
    if target.shape != logged.propensity.shape:
        raise ValueError(f"target has the shape {target.shape}; expected {logged.propensity.shape}.")
    if ((target > 0) & (logged.propensity <= 0)).any():
        raise ValueError("The target policy uses tiers that the log never tries; it cannot be judged.")
    taken: FloatArray = target[np.arange(len(logged.chosen)), logged.chosen] / logged.taken
    return taken


def _weights(logged: LoggedRows) -> FloatArray:
    return logged.weights if logged.weights is not None else np.ones(len(logged.chosen))


def _scaled(logged: LoggedRows, corrections: FloatArray) -> FloatArray:
    weights = _weights(logged)
    scaled: FloatArray = corrections * weights / weights.mean()
    return scaled


def _evaluated(ratio: FloatArray, estimate: Estimate) -> OffPolicyEstimate:
    square = float(ratio @ ratio)
    return OffPolicyEstimate(estimate, float(ratio.sum()) ** 2 / square if square > 0 else 0.0, float(ratio.max()))
