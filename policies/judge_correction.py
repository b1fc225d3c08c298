"""Corrects a rate for the errors of the judge who counted it.

A judge that is right nine times in ten reads a true 6 % as 15 %. Its error, measured on a gold set, is taken out here,
and the uncertainty about the error itself is carried along. Two ways, by what the gold set is:

- labelled cases from anywhere, if the judge errs on them as on traffic: by its sensitivity and specificity
  (:func:`debiased_rate`, :func:`debiased_upper`)
- a random part of the traffic itself: by the differences there (:func:`prediction_powered`,
  :func:`prediction_powered_upper`); no assumption on the judge at all

Neither protects against a gold set that is unlike the traffic in both respects.

References
----------
Rogan and Gladen 1978, "Estimating Prevalence from the Results of a Screening Test".
Lang and Reiczigel 2014, "Confidence Limits for Prevalence of Disease Adjusted for Estimated Sensitivity and
Specificity". Angelopoulos, Duchi and Zrnic 2023, "PPI++: Efficient Prediction-Powered Inference", section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from policies.intervals import (
    Estimate,
    FloatArray,
    binomial_lower,
    binomial_upper,
    bounded_upper,
    check_confidence,
)


@dataclass(frozen=True, slots=True)
class GoldCounts:
    """A judge against the truth. A fault is an answer that needed the upgrade; a flag is the judge saying so.

    Parameters
    ----------
    flagged_faults, num_faults : true faults that were flagged, of all true faults
    flagged_sound, num_sound : sound answers that were flagged, of all sound answers
    """

    flagged_faults: int
    num_faults: int
    flagged_sound: int
    num_sound: int

    def __post_init__(self) -> None:
        for name, hits, trials in (
            ("flagged_faults", self.flagged_faults, self.num_faults),
            ("flagged_sound", self.flagged_sound, self.num_sound),
        ):
            if not 0 <= hits <= trials:
                raise ValueError(f"{name} is {hits}; expected 0 to {trials}.")

    @property
    def sensitivity(self) -> float:
        """P(flag | fault); NaN without faults."""
        return self.flagged_faults / self.num_faults if self.num_faults else math.nan

    @property
    def specificity(self) -> float:
        """P(no flag | sound); NaN without sound answers."""
        return 1.0 - self.flagged_sound / self.num_sound if self.num_sound else math.nan

    def flag_rate(self, fault_rate: float) -> float:
        """Rate at which this judge would flag, were the true rate ``fault_rate``."""
        return fault_rate * self.sensitivity + (1.0 - fault_rate) * (1.0 - self.specificity)

    def flag_rate_upper(self, fault_rate: float, confidence: float) -> float:
        """Return upper bound of that rate, given what the gold set leaves open about the judge."""
        each = (1.0 + confidence) / 2
        hit = binomial_upper(self.flagged_faults, self.num_faults, each)
        alarm = binomial_upper(self.flagged_sound, self.num_sound, each)
        return fault_rate * hit + (1.0 - fault_rate) * alarm


def rogan_gladen(flag_rate: float, sensitivity: float, specificity: float) -> float:
    """Return the true rate behind a rate of flags, kept within 0..1; NaN for a judge no better than a coin."""
    informedness = sensitivity + specificity - 1.0
    if not informedness > 0.0:
        return math.nan
    return min(max((flag_rate + specificity - 1.0) / informedness, 0.0), 1.0)


def debiased_rate(num_flagged: float, num_judged: float, gold: GoldCounts, confidence: float = 0.95) -> Estimate:
    """Return the true fault rate behind flags, with the interval of Lang and Reiczigel.

    Parameters
    ----------
    num_flagged, num_judged : counts; for weighted samples the effective ones (:func:`effective_counts`)
    gold : the judge's errors
    confidence : two-sided, approximate; for a guarantee use :func:`debiased_upper`

    Returns
    -------
    0 to 1 as interval, value NaN, when nothing was judged or the judge is not shown to be better than a coin
    """
    check_confidence(confidence)
    if num_judged <= 0 or not gold.num_faults or not gold.num_sound:
        return Estimate(math.nan, 0.0, 1.0)
    value = rogan_gladen(num_flagged / num_judged, gold.sensitivity, gold.specificity)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    n, n_se, n_sp = num_judged + z * z, gold.num_faults + 2, gold.num_sound + 2
    p = (num_flagged + z * z / 2) / n
    se, sp = (gold.flagged_faults + 1) / n_se, (gold.num_sound - gold.flagged_sound + 1) / n_sp
    informedness = se + sp - 1.0
    if math.isnan(value) or informedness <= 0.0:
        return Estimate(math.nan, 0.0, 1.0)
    centre = (p + sp - 1.0) / informedness
    shift = 2 * z * z * (centre * se * (1 - se) / n_se - (1 - centre) * sp * (1 - sp) / n_sp)
    variance = p * (1 - p) / n + centre**2 * se * (1 - se) / n_se + (1 - centre) ** 2 * sp * (1 - sp) / n_sp
    half = z * math.sqrt(variance) / informedness
    low, high = (min(max(end, 0.0), 1.0) for end in (centre + shift - half, centre + shift + half))
    return Estimate(value, min(low, value), max(high, value))


def debiased_upper(flag_rate_upper: float, gold: GoldCounts, confidence: float) -> float:
    """Finite-sample upper bound of the true rate; 1 where the gold set proves nothing.

    Parameters
    ----------
    flag_rate_upper : an upper bound of the rate of flags, from its own share of the permitted error
    gold : the judge's errors
    confidence : of what is concluded from the gold set alone; errors add (Bonferroni)

    The true rate rises with the rate of flags and with specificity, and falls with sensitivity, so the bound takes the
    worst ends of all three.
    """
    each = (1.0 + confidence) / 2
    sensitivity = binomial_lower(gold.flagged_faults, gold.num_faults, each)
    specificity = 1.0 - binomial_lower(gold.flagged_sound, gold.num_sound, each)
    # Where flags outnumber what the judge could hit, specificity's worst end changes side; nothing is certified then.
    if sensitivity + specificity <= 1.0 or flag_rate_upper >= sensitivity:
        return 1.0
    return rogan_gladen(flag_rate_upper, sensitivity, specificity)


def prediction_powered(
    gold_values: FloatArray, gold_judged: FloatArray, judged: FloatArray, confidence: float = 0.95
) -> Estimate:
    """Return mean of the truth over traffic from many judgements and few truths, power-tuned (PPI++).

    Parameters
    ----------
    gold_values, gold_judged : float64 (m,), truth and judgement of a random part of the traffic, m >= 2
    judged : float64 (n,), judgements of the rest, n >= 2
    confidence : two-sided, by the central limit theorem

    Returns
    -------
    An estimate never asymptotically wider than that of the gold rows alone: a useless judge gets no weight
    """
    m, n = len(gold_values), len(judged)
    if m < 2 or n < 2 or len(gold_judged) != m:
        raise ValueError(f"{m} gold values, {len(gold_judged)} gold judgements, {n} others; expected m, m and n >= 2.")
    spread = float(np.concatenate([gold_judged, judged]).var(ddof=1))
    shared = float(np.cov(gold_values, gold_judged)[0, 1])
    weight = min(max(shared / ((1 + m / n) * spread), 0.0), 1.0) if spread > 0 else 0.0
    rectifier = gold_values - weight * gold_judged
    value = weight * float(judged.mean()) + float(rectifier.mean())
    error = math.sqrt(weight**2 * float(judged.var(ddof=1)) / n + float(rectifier.var(ddof=1)) / m)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    return Estimate(value, value - z * error, value + z * error)


def prediction_powered_upper(
    flag_rate_upper: float, gold_values: FloatArray, gold_judged: FloatArray, confidence: float
) -> float:
    """Finite-sample upper bound of the true mean: the judged bound, plus how far the judge may be too lenient.

    Parameters
    ----------
    flag_rate_upper : an upper bound of the mean judgement, from its own share of the permitted error
    gold_values, gold_judged : float64 (m,) in 0..1, of a random part of the traffic
    confidence : of what is concluded from the gold rows; errors add
    """
    halved = (1.0 + gold_values - gold_judged) / 2
    return min(flag_rate_upper + 2 * bounded_upper(halved, np.ones(len(halved)), confidence) - 1.0, 1.0)


def effective_counts(values: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """(hits, trials) of the unweighted sample with the same rate and the same precision (Kish 1965, section 11.7)."""
    if not len(values):
        return 0.0, 0.0
    trials = float(weights.sum() ** 2 / (weights @ weights))
    return float(weights @ values / weights.sum()) * trials, trials
