"""Decides whether a new router may replace the serving one: only on evidence, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policies.intervals import FloatArray, skewed_interval
from policies.offpolicy import LoggedRows, doubly_robust_rows, paired_difference


class PromotionVerdict(StrEnum):
    """``promote``: better beyond doubt. ``keep``: worse beyond doubt. ``insufficient``: the log cannot tell."""

    PROMOTE = "promote"
    KEEP = "keep"
    INSUFFICIENT = "insufficient"


@dataclass(frozen=True, slots=True)
class PromotionRule:
    """States what counts as better.

    Parameters
    ----------
    quality_value_usd : what a point of quality (0..1) is worth in dollars a request
    confidence : one-sided, that a promoted router is better, and that its quality is not lower than allowed
    max_quality_loss : quality that may be given up for cost, 0..1
    min_effective_rows : least effective rows of the candidate's own decisions

    Raises
    ------
    ValueError
        A field outside its range.
    """

    quality_value_usd: float
    confidence: float = 0.95
    max_quality_loss: float = 0.01
    min_effective_rows: float = 100.0

    def __post_init__(self) -> None:
        if not self.quality_value_usd >= 0 or not 0.5 <= self.confidence < 1:
            raise ValueError("quality_value_usd must be 0 or more, confidence from 0.5 to below 1.")
        if not 0 <= self.max_quality_loss <= 1 or not self.min_effective_rows >= 2:
            raise ValueError("max_quality_loss must be 0 to 1, min_effective_rows at least 2.")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict, its reason, and one-sided bounds of the differences (candidate less serving) behind it."""

    verdict: PromotionVerdict
    reason: str
    quality: float
    quality_low: float
    cost_usd: float
    worth_usd: float
    worth_low_usd: float
    worth_high_usd: float
    effective_rows: float


def judge_promotion(
    quality: LoggedRows, cost_usd: LoggedRows, candidate: FloatArray, serving: FloatArray, rule: PromotionRule
) -> Judgement:
    """Compare a candidate with the serving router on the same held-out rows of the log.

    Parameters
    ----------
    quality, cost_usd : the same decisions with their grades (0..1) and with their costs
    candidate, serving : float64 (n, T), the tiers each would choose; neither may have been fitted on these rows
    rule : what counts as better

    A candidate is promoted when the lower bound of its worth, quality in dollars less cost, is above the serving
    router's, and the lower bound of its quality is not below what may be given up.
    """
    two_sided = 2 * rule.confidence - 1
    found = paired_difference(quality, candidate, serving, two_sided)
    earned = doubly_robust_rows(quality, candidate) - doubly_robust_rows(quality, serving)
    paid_usd = doubly_robust_rows(cost_usd, candidate) - doubly_robust_rows(cost_usd, serving)
    worth = skewed_interval(rule.quality_value_usd * earned - paid_usd, two_sided)
    cost = float(paid_usd.mean())
    verdict, reason = _decide(rule, found.estimate.low, worth.low, worth.high, found.effective_rows)
    return Judgement(
        verdict,
        reason,
        found.estimate.value,
        found.estimate.low,
        cost,
        worth.value,
        worth.low,
        worth.high,
        found.effective_rows,
    )


def _decide(
    rule: PromotionRule, quality_low: float, worth_low: float, worth_high: float, effective_rows: float
) -> tuple[PromotionVerdict, str]:
    stated = f"with {rule.confidence:.0%} confidence"
    if effective_rows < rule.min_effective_rows:
        return PromotionVerdict.INSUFFICIENT, (
            f"The log holds {effective_rows:.0f} effective rows of the candidate's decisions; "
            f"{rule.min_effective_rows:.0f} are needed."
        )
    if worth_high < 0.0:
        return PromotionVerdict.KEEP, f"The candidate is worse by {-worth_high:.6f} USD a request or more, {stated}."
    if quality_low < -rule.max_quality_loss:
        return PromotionVerdict.INSUFFICIENT, (
            f"The candidate may lose {-quality_low:.4f} of quality, {stated}; {rule.max_quality_loss:.4f} is allowed."
        )
    if worth_low <= 0.0:
        return PromotionVerdict.INSUFFICIENT, f"The candidate is not shown to be better, {stated}."
    return PromotionVerdict.PROMOTE, f"The candidate is better by {worth_low:.6f} USD a request or more, {stated}."
