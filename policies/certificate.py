"""Whether the quality floor is held: a statement with a finite-sample guarantee, or "insufficient evidence".

Checked answers carry a loss from 0 (as good as the top tier's) to 1 (an upgrade was needed) and the probability with
which they were drawn for checking. A floor of q permits a mean loss of 1 - q over all traffic; answers of the top tier
itself lose nothing.

References
----------
Angelopoulos et al. 2021, "Learn then Test: Calibrating Predictive Algorithms to Achieve Risk Control", section 3
(fixed-sequence testing). Horvitz and Thompson 1952, "A Generalization of Sampling Without Replacement".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from policies.intervals import (
    FloatArray,
    binomial_lower,
    binomial_upper,
    bounded_upper,
    check_confidence,
)
from policies.judge_correction import GoldCounts


class FloorStatus(StrEnum):
    """``held``: shown with the confidence asked. ``broken``: the opposite is. ``insufficient``: neither is yet."""

    HELD = "held"
    BROKEN = "broken"
    INSUFFICIENT = "insufficient"


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """A sample of checked answers out of known traffic.

    Parameters
    ----------
    losses : float64 (n,), 0..1, of the answers that were checked
    inclusion : float64 (n,), probabilities with which each was drawn, above 0
    num_requests : all requests the sample stands for, checked or not
    least_inclusion : least probability any request that could lose had; the least of ``inclusion`` when not given.
        Give it where it is known: the bound rests on it
    kept : bool (n,), rows that stay below the top; the others lose nothing, whatever a judge said. All when not given
    """

    losses: FloatArray
    inclusion: FloatArray
    num_requests: int
    least_inclusion: float | None = None
    kept: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if self.losses.ndim != 1 or self.losses.shape != self.inclusion.shape:
            raise ValueError(f"losses and inclusion have the shapes {self.losses.shape} and {self.inclusion.shape}.")
        if self.num_requests < len(self.losses):
            raise ValueError(f"{len(self.losses)} checked of {self.num_requests} requests cannot be.")
        if len(self.losses) and not (self.inclusion.min() > 0 and self.inclusion.max() <= 1):
            raise ValueError("inclusion must be above 0 and at most 1.")
        if len(self.losses) and not (self.losses.min() >= 0 and self.losses.max() <= 1):
            raise ValueError("losses must lie in 0..1.")
        if self.least_inclusion is not None and not 0 < self.least_inclusion <= self._least_seen:
            raise ValueError(
                f"least_inclusion is {self.least_inclusion}; expected above 0, at most {self._least_seen}."
            )

    @property
    def _least_seen(self) -> float:
        return float(self.inclusion.min()) if len(self.losses) else 1.0

    @property
    def mean(self) -> float:
        """Horvitz–Thompson estimate of the mean loss; NaN without traffic."""
        return float((self.losses / self.inclusion).sum()) / self.num_requests if self.num_requests else float("nan")

    @property
    def is_simple(self) -> bool:
        """Return every request was checked, and every loss is 0 or 1: the binomial case."""
        return len(self.losses) == self.num_requests and bool(np.isin(self.losses, (0.0, 1.0)).all())

    @property
    def scale(self) -> float:
        """Return the most that one loss can count."""
        return 1.0 / (self.least_inclusion if self.least_inclusion is not None else self._least_seen)

    def keeping(self, kept: NDArray[np.bool_]) -> CheckedSample:
        """Return the same traffic, had the rows outside ``kept`` gone to the top tier, where they lose nothing."""
        losses = np.where(kept, self.losses, 0.0)
        return CheckedSample(losses, self.inclusion, self.num_requests, self.least_inclusion, kept)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Holds what can be said about a floor.

    ``loss_low`` and ``loss_high`` are one-sided bounds of the mean loss, each with ``confidence``; ``loss`` is its
    estimate, 0 where nothing was checked.
    """

    status: FloorStatus
    floor: float
    confidence: float
    loss: float
    loss_low: float
    loss_high: float
    num_checked: int
    num_requests: int

    @property
    def quality_low(self) -> float:
        """Return the floor that is held with this confidence, whatever was asked for."""
        return 1.0 - self.loss_high


def certify(checked: CheckedSample, floor: float, confidence: float, gold: GoldCounts | None = None) -> Certificate:
    """Decide whether the mean loss is at most ``1 - floor``.

    Parameters
    ----------
    checked : the sample
    floor : 0..1
    confidence : one-sided, of each of the two possible findings
    gold : the judge's errors; without them its verdicts are taken for the truth

    With gold, half of the permitted error is spent on the rate of flags and half on the judge, and only ``held`` can be
    concluded from the corrected bound; ``loss`` and ``loss_low`` stay those of the verdicts as they were given.
    """
    check_confidence(confidence)
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor is {floor!r}; expected 0 to 1.")
    spent = confidence if gold is None else (1.0 + confidence) / 2
    low = loss_lower(checked, spent)
    high = loss_upper(checked, spent) if gold is None else _corrected_upper(checked, gold, spent)
    status = FloorStatus.INSUFFICIENT
    if high <= 1.0 - floor:
        status = FloorStatus.HELD
    elif gold is None and low > 1.0 - floor:
        status = FloorStatus.BROKEN
    return Certificate(status, floor, confidence, checked.mean, low, high, len(checked.losses), checked.num_requests)


def loss_upper(checked: CheckedSample, confidence: float) -> float:
    """Upper bound of the mean loss: exact binomial where that applies, otherwise by betting on weighted losses."""
    if not len(checked.losses):
        return 1.0
    if checked.is_simple:
        return binomial_upper(int(checked.losses.sum()), checked.num_requests, confidence)
    return min(_weighted_upper(checked, checked.losses, 0.0, 1.0, confidence), 1.0)


def loss_lower(checked: CheckedSample, confidence: float) -> float:
    """Return lower bound of the mean loss, likewise."""
    if not len(checked.losses):
        return 0.0
    if checked.is_simple:
        return binomial_lower(int(checked.losses.sum()), checked.num_requests, confidence)
    return max(-_weighted_upper(checked, -checked.losses, -1.0, 0.0, confidence), 0.0)


def _corrected_upper(checked: CheckedSample, gold: GoldCounts, confidence: float) -> float:
    """Return upper bound of the mean loss behind the verdicts of a judge that errs.

    A verdict v on a kept row counts (v - f) / (s - f) with f the rate of false flags and s that of true ones: its mean
    is the true loss (Rogan and Gladen). The worst ends of what gold says are a small f and a small s. Where that f is
    not the worst, more was flagged than s could explain, and the bound is beyond all kept traffic anyway.
    """
    if not len(checked.losses):
        return 1.0
    each = (1.0 + confidence) / 2
    hit = binomial_lower(gold.flagged_faults, gold.num_faults, each)
    alarm = binomial_lower(gold.flagged_sound, gold.num_sound, each)
    if hit <= alarm:
        return 1.0
    corrected = (checked.losses - alarm) / (hit - alarm)
    if checked.kept is not None:
        corrected = np.where(checked.kept, corrected, 0.0)
    ends = (-alarm / (hit - alarm), (1.0 - alarm) / (hit - alarm))
    return min(max(_weighted_upper(checked, corrected, *ends, confidence), 0.0), 1.0)


def _weighted_upper(checked: CheckedSample, values: FloatArray, least: float, most: float, confidence: float) -> float:
    """Return upper bound of the mean over all requests of values in ``least`` .. ``most`` (least <= 0 <= most).

    The mean of drawn * value / inclusion over all requests is the mean value, whatever the design (Horvitz and
    Thompson); a request that was not drawn counts 0.
    """
    low, width = least * checked.scale, (most - least) * checked.scale
    found, counts = np.unique((values / checked.inclusion - low) / width, return_counts=True)
    missing = checked.num_requests - len(values)
    scaled = np.clip(np.append(found, -low / width), 0.0, 1.0)
    return low + width * bounded_upper(scaled, np.append(counts, missing), confidence)


@dataclass(frozen=True, slots=True)
class CertifiedThreshold:
    """The lowest threshold that holds the floor, and its certificate; ``threshold`` None: none does, all goes up."""

    threshold: float | None
    certificate: Certificate | None


def certify_threshold(
    p_as_good: FloatArray,
    checked: CheckedSample,
    thresholds: Sequence[float],
    floor: float,
    confidence: float,
    gold: GoldCounts | None = None,
) -> CertifiedThreshold:
    """Return the cheapest of a grid of thresholds that still holds the floor, with the confidence of a single test.

    Parameters
    ----------
    p_as_good : float64 (n,), the router's estimate for each checked answer
    checked : answers of the lower tier, checked; rows below a threshold would have gone to the top
    thresholds : the grid, chosen before these rows were seen
    floor, confidence, gold : as in :func:`certify`

    Testing runs from the safest threshold to the cheapest and stops at the first that fails, so the error is not
    multiplied by the size of the grid (fixed-sequence testing).
    """
    found = CertifiedThreshold(None, None)
    for threshold in sorted(thresholds, reverse=True):
        certificate = certify(checked.keeping(p_as_good >= threshold), floor, confidence, gold)
        if certificate.status is not FloorStatus.HELD:
            break
        found = CertifiedThreshold(threshold, certificate)
    return found
