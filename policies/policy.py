"""The policy: which tiers, how good, at what price, with how much exploration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum

from policies.errors import InvalidPolicy
from policies.escalation import Escalation
from policies.ladder import Ladder, is_in_regions, region_problem
from policies.resumption import OnBreak
from policies.sampling import Sampling
from policies.types import ThresholdMode, Tier


class StickyMode(StrEnum):
    """Says how much a conversation's last tier counts in the next turn.

    ``off``: nothing. ``cost``: leaving it costs the tokens its KV cache holds, priced by the policy. ``always``: the
    conversation stays where it is for as long as that tier may and can serve it.
    """

    OFF = "off"
    COST = "cost"
    ALWAYS = "always"


class FallbackMode(StrEnum):
    """Says where a request goes when its tier is down, or fails before the first token.

    ``up``: to the dearer tiers in order, then to the cheaper ones from the top; only to tiers that the policy's own
    floor permits (:mod:`policies.stand_ins`). ``up_only``: the same, and never to a cheaper tier. ``any``: to every
    permitted tier in that order, however good; an answer is then worth more than the floor. ``none``: the error is the
    caller's to see.
    """

    UP = "up"
    UP_ONLY = "up_only"
    ANY = "any"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Policy:
    """States how requests are turned into tiers. Immutable; an edited policy is a new version.

    Parameters
    ----------
    name, version : identity, on every decision's log row
    mode : ``floor`` picks the cheapest tier whose P(as good as the top tier) reaches its threshold;
        ``benefit`` picks the largest ``quality_value_usd * P(right) - cost``: a dearer tier must earn its price
    allowed_tiers : numbers of the tiers it may use, all when empty
    allowed_regions : regions that a prompt may be sent to, to be answered or to be checked; anywhere when empty. A tier
        without a `region` is in none of them
    max_cost_usd : most that a request may be expected to cost, by the price table and `expected_output_tokens`; dearer
        tiers are not permitted, and a request without any other is refused. None for no limit
    budget_usd_per_day : most dollars that its requests may cost in a day (UTC) together; beyond it they are refused.
        None for no limit
    quality_floor : share of the top tier's quality to hold, 0..1
    confidence : confidence with which the floor is to be held, 0..1, used when thresholds are derived
    thresholds : tier number -> least P(as good); a tier without one uses ``quality_floor``
    quality_value_usd : what a right answer is worth over a wrong one; None means derived with the router
    exploration_share : share of traffic spread evenly over the permitted tiers, whatever the estimates say, 0..1
    sampling_share : share of answers below the top tier that are to be checked against it, 0..1
    sampling : how the share differs by tier and confidence, and how often dear answers are checked downward
    max_novelty : a prompt more foreign than this to the router goes to the highest permitted tier, 0..1; None means
        derived with the router, and no limit without one
    sticky : what a conversation's last tier counts for
    switch_cost_per_cached_token_usd : price of a cached token lost by leaving the conversation's tier, on top of
        what that tier takes less for one
    wait_cost_per_s_usd : price of a second of expected waiting
    max_wait_s : a tier expected to wait longer counts as unavailable while another that may stand in for it is free;
        None for no limit
    fallback : where a request goes when its tier is down or fails before its first token: `up` and `up_only` keep the
        floor, `any` gives it up for an answer, `none` goes nowhere
    max_fallbacks : how many further tiers are tried
    on_break : what becomes of an answer whose tier fails after its first token: with `resume` another tier that may
        answer in its place goes on from what was sent, where it can; with `error` it ends with the error
    escalation : whether an answer its own tier doubts is answered by a higher tier within the request
    expected_output_tokens : completion length assumed when comparing costs, at most the request's ``max_tokens``

    Raises
    ------
    InvalidPolicy
        A field outside its range; names it.
    """

    name: str = "default"
    version: str = "1"
    mode: ThresholdMode = ThresholdMode.FLOOR
    allowed_tiers: tuple[int, ...] = ()
    allowed_regions: tuple[str, ...] = ()
    max_cost_usd: Decimal | None = None
    budget_usd_per_day: Decimal | None = None
    quality_floor: float = 0.95
    confidence: float = 0.95
    thresholds: Mapping[int, float] = field(default_factory=dict)
    quality_value_usd: Decimal | None = None
    exploration_share: float = 0.02
    sampling_share: float = 0.05
    sampling: Sampling = field(default_factory=Sampling)
    max_novelty: float | None = None
    sticky: StickyMode = StickyMode.COST
    switch_cost_per_cached_token_usd: Decimal = Decimal(0)
    wait_cost_per_s_usd: Decimal = Decimal(0)
    max_wait_s: float | None = None
    fallback: FallbackMode = FallbackMode.UP
    max_fallbacks: int = 3
    on_break: OnBreak = OnBreak.RESUME
    escalation: Escalation = field(default_factory=Escalation)
    expected_output_tokens: int = 256

    def __post_init__(self) -> None:
        for name, (holds, expected) in _LIMITS.items():
            value = getattr(self, name)
            if not holds(value):
                raise InvalidPolicy(name, value, expected)
        for tier, threshold in self.thresholds.items():
            if not _is_share(threshold):
                raise InvalidPolicy(f"thresholds.{tier}", threshold, "a probability from 0 to 1")
        for region in self.allowed_regions:
            if problem := region_problem(region):
                raise InvalidPolicy("allowed_regions", region, problem)

    def check_against(self, ladder: Ladder) -> None:
        """Refuse a policy that names tiers or regions the ladder does not have, or that leaves no tier.

        Raises
        ------
        InvalidPolicy
            ``allowed_tiers``, ``thresholds``, ``sampling.shares`` or ``escalation.least_confidence`` names an unknown
            tier; ``allowed_regions`` names an unknown region, or none of an allowed tier.
        """
        known = {tier.index for tier in ladder}
        expected = f"numbers among {sorted(known)}"
        if unknown := set(self.allowed_tiers) - known:
            raise InvalidPolicy("allowed_tiers", sorted(unknown), expected)
        if unknown := set(self.thresholds) - known:
            raise InvalidPolicy("thresholds", sorted(unknown), expected)
        if unknown := set(self.sampling.shares) - known:
            raise InvalidPolicy("sampling.shares", sorted(unknown), expected)
        if unknown := set(self.escalation.least_confidence) - known:
            raise InvalidPolicy("escalation.least_confidence", sorted(unknown), expected)
        regions = {tier.region for tier in ladder if tier.region is not None}
        if unknown_regions := set(self.allowed_regions) - regions:
            known_regions = ", ".join(sorted(regions)) or "none: no tier has one"
            raise InvalidPolicy("allowed_regions", sorted(unknown_regions), f"regions of the tiers ({known_regions})")
        if not any(map(self.permits, ladder)):
            raise InvalidPolicy("allowed_regions", list(self.allowed_regions), "a region of one of the allowed tiers")

    def permits(self, tier: Tier) -> bool:
        """Return whether its requests may be sent to a tier at all, whatever they cost there."""
        is_named = not self.allowed_tiers or tier.index in self.allowed_tiers
        return is_named and is_in_regions(tier, self.allowed_regions)

    def top(self, ladder: Ladder) -> int:
        """Number of the highest tier it permits: the one that its quality is measured against."""
        if not self.allowed_tiers and not self.allowed_regions:
            return ladder[-1].index
        return max((tier.index for tier in ladder if self.permits(tier)), default=len(ladder))

    def threshold(self, tier: int) -> float:
        """Return least P(as good as the top tier) at which this tier suffices."""
        return self.thresholds.get(tier, self.quality_floor)

    def with_derived(
        self,
        *,
        thresholds: Mapping[int, float] | None = None,
        quality_value_usd: Decimal | None = None,
        max_novelty: float | None = None,
    ) -> Policy:
        """Return a copy in which what the policy leaves open is filled with values derived from labelled traffic.

        What the policy states itself always wins over what was derived.
        """
        return dataclasses.replace(
            self,
            thresholds=self.thresholds or dict(thresholds or {}),
            quality_value_usd=self.quality_value_usd if self.quality_value_usd is not None else quality_value_usd,
            max_novelty=self.max_novelty if self.max_novelty is not None else max_novelty,
        )


def _is_share(value: float) -> bool:
    return math.isfinite(value) and 0.0 <= value <= 1.0


def _is_price(value: Decimal | None) -> bool:
    return value is None or (value.is_finite() and value >= 0)


_LIMITS: Mapping[str, tuple[Callable[..., bool], str]] = {
    "name": (lambda v: 0 < len(v) <= 64, "1 to 64 characters"),
    "version": (lambda v: 0 < len(v) <= 64, "1 to 64 characters"),
    "allowed_tiers": (lambda v: len(set(v)) == len(v) and all(t >= 1 for t in v), "different tier numbers from 1"),
    "allowed_regions": (lambda v: len(set(v)) == len(v), "different regions"),
    "max_cost_usd": (_is_price, "a finite amount of dollars, 0 or more"),
    "budget_usd_per_day": (_is_price, "a finite amount of dollars, 0 or more"),
    "quality_floor": (_is_share, "a share from 0 to 1"),
    "confidence": (lambda v: 0.5 <= v < 1.0, "a confidence from 0.5 to below 1"),
    "quality_value_usd": (_is_price, "a finite amount of dollars, 0 or more"),
    "exploration_share": (_is_share, "a share from 0 to 1"),
    "sampling_share": (_is_share, "a share from 0 to 1"),
    "max_novelty": (lambda v: v is None or _is_share(v), "a number from 0 to 1"),
    "switch_cost_per_cached_token_usd": (_is_price, "a finite amount of dollars, 0 or more"),
    "wait_cost_per_s_usd": (_is_price, "a finite amount of dollars, 0 or more"),
    "max_wait_s": (lambda v: v is None or (math.isfinite(v) and v >= 0), "seconds, 0 or more"),
    "max_fallbacks": (lambda v: 0 <= v <= 100, "a count from 0 to 100"),
    "expected_output_tokens": (lambda v: v >= 1, "a count from 1"),
}
