"""Draws what routing buys: cost against quality, for estimates of any origin.

Every router is reduced to an order of preference, so a learned one, prompt length, chance and an oracle are all
judged by the same lines.

References
----------
Ong et al. 2024, "RouteLLM", section 3 (PGR, APGR, CPT). Hu et al. 2024, "RouterBench", section 3 (cost-quality hull).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from classifier.rows import Floats


@dataclass(frozen=True, slots=True)
class PairCurve:
    """Holds quality while the share of strong calls rises from none to all, best-first by a router's ranking.

    Attributes
    ----------
    recovered : float64 (n + 1,), performance gap recovered after k = 0 .. n strong calls; may pass 1, since the strong
        model hurts some requests
    quality : float64 (n + 1,), mean score after k strong calls
    """

    recovered: Floats
    quality: Floats

    @property
    def apgr(self) -> float:
        """Return the average performance gap recovered; a random order gives 0.5."""
        return float(self.recovered.mean())

    def share_recovering(self, gap_share: float) -> float:
        """Return the least share of strong calls that recovers this share of the gap (CPT)."""
        return _first_share(self.recovered, gap_share)

    def share_holding(self, quality_share: float) -> float:
        """Return the least share of strong calls that holds this share of the strong model's quality."""
        return _first_share(self.quality, quality_share * float(self.quality[-1]))


def _first_share(curve: Floats, level: float) -> float:
    reached = np.flatnonzero(curve >= level - 1e-12)
    return float(reached[0]) / max(len(curve) - 1, 1) if len(reached) else 1.0


def pair_curve(benefit: Floats, weak: Floats, strong: Floats) -> PairCurve:
    """Return the curve of sending requests to the strong model in order of estimated benefit, ties averaged.

    Parameters
    ----------
    benefit : float64 (n,), higher goes up first
    weak, strong : float64 (n,), scores of the two answers, 0..1
    """
    gain = strong - weak
    # Equal benefits are in no order: each such request gains the mean of its block.
    _, block, sizes = np.unique(-benefit, return_inverse=True, return_counts=True)
    block_gain = np.bincount(block, weights=gain) / sizes
    quality = weak.mean() + np.concatenate([[0.0], np.cumsum(np.repeat(block_gain, sizes))]) / len(weak)
    gap = float(strong.mean() - weak.mean())
    recovered = (quality - weak.mean()) / gap if gap else np.full(len(quality), np.nan)
    return PairCurve(recovered, quality)


@dataclass(frozen=True, slots=True)
class LadderCurve:
    """Holds mean cost and mean quality of a router at each of its settings, cheapest first; and the share of each tier.

    Attributes
    ----------
    cost, quality : float64 (k,)
    shares : float64 (k, num_tiers), each row sums to 1
    """

    cost: Floats
    quality: Floats
    shares: Floats

    def cost_holding(self, quality: float) -> float | None:
        """Return the least mean cost that reaches this quality, by a mix of settings; None if none does."""
        hull_cost, hull_quality = upper_hull(self.cost, self.quality)
        if quality > hull_quality[-1] + 1e-12:
            return None
        return float(np.interp(quality, hull_quality, hull_cost))

    def quality_at(self, cost: float) -> float:
        """Return the best quality at no more than this mean cost, by a mix of settings; NaN below the cheapest."""
        if cost < self.cost.min() - 1e-12:
            return float("nan")
        hull_cost, hull_quality = upper_hull(self.cost, self.quality)
        return float(np.interp(cost, hull_cost, hull_quality))


def upper_hull(cost: Floats, quality: Floats) -> tuple[Floats, Floats]:
    """Return the non-decreasing upper convex hull of points: what mixing settings at random can reach."""
    points: list[tuple[float, float]] = []
    for c, q in sorted(zip(cost.tolist(), quality.tolist(), strict=True), key=lambda p: (p[0], -p[1])):
        if points and q <= points[-1][1]:
            continue
        while len(points) >= 2 and _is_under(points[-2], points[-1], (c, q)):
            points.pop()
        points.append((c, q))
    hull = np.array(points, dtype=np.float64)
    return hull[:, 0], hull[:, 1]


def _is_under(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def mean_cost_quality(tiers: np.ndarray, scores: Floats, costs: Floats) -> tuple[float, float, Floats]:
    """Return mean cost, mean quality and tier shares of one assignment.

    Parameters
    ----------
    tiers : int64 (n,), 0-based
    scores : float64 (n, num_tiers)
    costs : float64 (num_tiers,), or (n, num_tiers) where a request's own cost is known
    """
    rows = np.arange(len(tiers))
    per_request = costs[tiers] if costs.ndim == 1 else costs[rows, tiers]
    shares = np.bincount(tiers, minlength=scores.shape[1]) / len(tiers)
    return float(per_request.mean()), float(scores[rows, tiers].mean()), shares


def ladder_curve(estimates: Floats, scores: Floats, costs: Floats, num_settings: int = 201) -> LadderCurve:
    """Sweep the price put on quality: each request goes where ``value * P(right) - cost`` is largest.

    Parameters
    ----------
    estimates : float64 (n, num_tiers), P(right)
    scores : float64 (n, num_tiers), what happened, 0..1
    costs : float64 (num_tiers,) or (n, num_tiers)
    num_settings : how many values of quality are tried, spaced evenly in logarithm
    """
    top = float(np.max(costs))
    values = np.concatenate([[0.0], np.geomspace(top * 1e-2, top * 1e4, num_settings - 1)])
    points = [mean_cost_quality(np.argmax(v * estimates - costs, axis=1), scores, costs) for v in values]
    return LadderCurve(
        np.array([p[0] for p in points]), np.array([p[1] for p in points]), np.array([p[2] for p in points])
    )


def fixed_mix_curve(scores: Floats, costs: Floats) -> LadderCurve:
    """Return each tier alone: the points between which a mix without a router moves."""
    num_tiers = scores.shape[1]
    points = [mean_cost_quality(np.full(len(scores), tier), scores, costs) for tier in range(num_tiers)]
    return LadderCurve(
        np.array([p[0] for p in points]), np.array([p[1] for p in points]), np.array([p[2] for p in points])
    )
