"""Routing without a router: the mix of tiers that every router has to beat.

Sending fixed shares of the traffic to tiers, blind to the request, reaches every point under the upper convex hull of
the tiers' (cost, quality). A router whose point is not above that hull is worth nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Mix:
    """Fixed shares of the tiers, cheapest first, and their mean cost and quality a request."""

    shares: tuple[float, ...]
    cost_usd: float
    quality: float


def best_mix_at_cost(costs_usd: Sequence[float], qualities: Sequence[float], budget_usd: float) -> Mix | None:
    """The mix of greatest quality whose mean cost does not pass the budget; None when even the cheapest tier does."""
    mixes = [_mix(costs_usd, qualities, (tier, tier), 0.0) for tier, cost in enumerate(costs_usd) if cost <= budget_usd]
    for low, high in combinations(sorted(range(len(costs_usd)), key=costs_usd.__getitem__), 2):
        if costs_usd[low] <= budget_usd < costs_usd[high]:
            share = (budget_usd - costs_usd[low]) / (costs_usd[high] - costs_usd[low])
            mixes.append(_mix(costs_usd, qualities, (low, high), share))
    return max(mixes, key=lambda mix: (mix.quality, -mix.cost_usd), default=None)


def _mix(costs_usd: Sequence[float], qualities: Sequence[float], pair: tuple[int, int], share: float) -> Mix:
    """``share`` of the traffic on the pair's second tier, the rest on its first."""
    low, high = pair
    shares = [0.0] * len(costs_usd)
    shares[low] += 1.0 - share
    shares[high] += share
    return Mix(
        shares=tuple(shares),
        cost_usd=(1.0 - share) * costs_usd[low] + share * costs_usd[high],
        quality=(1.0 - share) * qualities[low] + share * qualities[high],
    )
