"""Exploration with known probabilities: what makes the decision log able to judge other routers.

A share of the traffic is spread evenly over the tiers a request may use, whatever the estimates say. Every decision
carries the probability with which its tier was chosen, so that outcomes can be weighted by its inverse
(Horvitz and Thompson 1952; for routing logs, Dudík et al. 2014, "Doubly Robust Policy Evaluation and Optimization").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol


class Uniform(Protocol):
    """A source of randomness: ``random.Random`` is one."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


@lru_cache(4096)
def propensities(best: int, tiers: tuple[int, ...], share: float) -> Mapping[int, float]:
    """Return probability of each tier when ``share`` of the traffic is spread evenly and the rest goes to ``best``.

    Parameters
    ----------
    best : tier that the rest goes to
    tiers : one tier number for each equal part of the share; a number may stand there more than once
    share : 0..1

    Returns
    -------
    tier -> probability, shared by equal calls and so not to be changed; the sum is 1 to rounding, and exactly 1 for
    ``best`` alone without exploration
    """
    each = share / len(tiers)
    found = {tier: each * tiers.count(tier) for tier in tiers}
    # The rest and best's own part in one sum: exactly 1 where best is alone.
    return found | {best: (1.0 - share) + found.get(best, 0.0)}


def draw_tier(best: int, tiers: Sequence[int], share: float, rng: Uniform) -> int:
    """Draw a tier with exactly these propensities, from one uniform number."""
    u = rng.random()
    if u >= share:
        return best
    # u / share is uniform on [0, 1) given u < share; the bound guards against rounding up at the end.
    return tiers[min(int(u / share * len(tiers)), len(tiers) - 1)]
