"""Labelled traffic as arrays, and what a rule would have cost and earned on it.

The rules here are the vectorised forms of :mod:`policies.tier_choice`; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LabelledTraffic:
    """Requests whose answers were graded at every tier. Columns are tiers, cheapest first, the last one the top.

    Parameters
    ----------
    p_right, p_as_good : float64 (n, T), the router's estimates, made without having seen these labels
    quality : float64 (n, T), grade of each tier's answer, 0..1
    cost_usd : float64 (n, T), cost of each tier's answer
    weights : float64 (n,), inverse inclusion probabilities; equal when not given
    """

    p_right: FloatArray
    p_as_good: FloatArray
    quality: FloatArray
    cost_usd: FloatArray
    weights: FloatArray | None = None

    def __post_init__(self) -> None:
        shape = self.quality.shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"quality has the shape {shape}; expected (requests, tiers), neither of them 0.")
        for name in ("p_right", "p_as_good", "cost_usd"):
            array = getattr(self, name)
            if array.shape != shape:
                raise ValueError(f"{name} has the shape {array.shape}; expected {shape}, that of quality.")
        for name in ("p_right", "p_as_good", "quality", "cost_usd", "weights"):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                raise ValueError(f"{name} has values that are not finite.")
        if self.weights is not None and (self.weights.shape != shape[:1] or (self.weights <= 0).any()):
            raise ValueError(f"weights must be {shape[0]} numbers above 0.")

    @property
    def num_tiers(self) -> int:
        return int(self.quality.shape[1])


@dataclass(frozen=True, slots=True)
class Performance:
    """Holds what a rule would have done: mean cost and quality a request, its share per tier, its margin over a floor.

    ``margin`` is mean(quality - floor * top quality); ``margin_low`` its one-sided lower confidence bound. The floor
    is held with the stated confidence when ``margin_low`` is not below 0.
    """

    cost_usd: float
    quality: float
    quality_vs_top: float
    shares: tuple[float, ...]
    margin: float
    margin_low: float

    @property
    def holds(self) -> bool:
        return self.margin_low >= 0.0


def choose_by_thresholds(traffic: LabelledTraffic, thresholds: Mapping[int, float]) -> IntArray:
    """Column of the cheapest tier whose P(as good) reaches its threshold; the top always does.

    ``thresholds`` has one entry for every tier below the top, keyed by tier number from 1.
    """
    top = traffic.num_tiers - 1
    needed = np.array([thresholds[column + 1] for column in range(top)])
    sufficient = np.ones(traffic.quality.shape, dtype=bool)
    sufficient[:, :top] = traffic.p_as_good[:, :top] >= needed
    # The top is a way out, not a bargain: it competes on cost only where a lower tier suffices too.
    cost_usd = np.where(sufficient, traffic.cost_usd, np.inf)
    return np.asarray(np.argmin(cost_usd, axis=1), dtype=np.int64)


def choose_by_value(traffic: LabelledTraffic, quality_value_usd: float) -> IntArray:
    """Column of the largest worth of P(right) less cost; of equals the cheaper, then the lower."""
    net_usd = quality_value_usd * traffic.p_right - traffic.cost_usd
    best = net_usd.max(axis=1, keepdims=True)
    tied_usd = np.where(net_usd == best, traffic.cost_usd, np.inf)
    return np.asarray(np.argmin(tied_usd, axis=1), dtype=np.int64)


def performance(
    traffic: LabelledTraffic, chosen: IntArray, floor: float, confidence: float, exploration_share: float = 0.0
) -> Performance:
    """Measure a choice of one column a request against ``floor`` times the top tier's quality.

    ``exploration_share`` of the traffic goes to every tier alike instead, as the policy will have it: the floor is
    to hold for what is really served.

    The bound is the normal one for a weighted mean of paired differences: each request is compared with the top
    tier's answer to the same request, so what makes requests easy or hard cancels out.
    """
    shares = np.full(traffic.quality.shape, exploration_share / traffic.num_tiers)
    shares[np.arange(len(chosen)), chosen] += 1.0 - exploration_share
    weights = traffic.weights if traffic.weights is not None else np.ones(len(chosen))
    weights = weights / weights.sum()
    earned, best = (shares * traffic.quality).sum(axis=1), traffic.quality[:, -1]
    difference = earned - floor * best
    margin = float(weights @ difference)
    deviation = float(np.sqrt(weights**2 @ (difference - margin) ** 2))
    top_quality = float(weights @ best)
    quality = float(weights @ earned)
    return Performance(
        cost_usd=float(weights @ (shares * traffic.cost_usd).sum(axis=1)),
        quality=quality,
        quality_vs_top=quality / top_quality if top_quality > 0 else float("inf"),
        shares=tuple((weights @ shares).tolist()),
        margin=margin,
        margin_low=margin - NormalDist().inv_cdf(confidence) * deviation,
    )
