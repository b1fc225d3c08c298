"""Lower bounds on the cost of serving after the change: of an oracle, and of the best possible router.

No router reads either. The second is what a router that knew family and grade of every prompt could reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.simulate.accuracy import Accuracy
from gateway.simulate.scenario import Conditions
from gateway.simulate.traffic_generator import TrafficGenerator

Floats = NDArray[np.float64]

_NUM_TASKS = 4000


def lowest_costs(conditions: Conditions, prices: Sequence[float], floor: float, seed: int) -> dict[str, Any]:
    """Return both bounds as shares of serving all by the top tier: ``cost_all_known`` and ``cost_chances_known``.

    Parameters
    ----------
    conditions : the world, its price factors apart
    prices : of a request at every tier, dollars, with the factors
    floor : part of the top tier's right answers to keep
    """
    world, paid = TrafficGenerator(Accuracy.load(), seed), np.array(prices)
    asked = [world.ask(conditions) for _ in range(_NUM_TASKS)]
    right = np.array([each.right for each in asked], dtype=np.float64)
    chances = np.array([each.chances for each in asked])
    cheapest = np.argmax(right >= right[:, -1:], axis=1)
    return {
        "cost_all_known": round(float(paid[cheapest].mean() / paid[-1]), 4),
        "cost_chances_known": round(_least_cost(chances, paid, floor) / float(paid[-1]), 4),
    }


def _least_cost(chances: Floats, paid: Floats, floor: float) -> float:
    """By one price of quality for all, as the Lagrangian of cost under a bound on quality has it."""
    rows, least = np.arange(len(chances)), float(paid[-1])
    for price in np.geomspace(paid.min(), 1e4 * paid.max(), 400):
        chosen = (price * chances - paid).argmax(axis=1)
        if chances[rows, chosen].sum() >= floor * chances[:, -1].sum():
            least = min(least, float(paid[chosen].mean()))
    return least
