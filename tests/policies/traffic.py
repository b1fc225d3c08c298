"""Synthetic labelled traffic for the tests of derived numbers."""

from __future__ import annotations

import numpy as np

from policies.labelled_traffic import LabelledTraffic
from tests.policies.strategies import LADDER

COSTS_USD = np.array([float(tier.price_per_request_usd) for tier in LADDER])


def traffic_of(num_requests: int, seed: int, *, informative: bool = True) -> LabelledTraffic:
    """Requests of a hidden difficulty; each tier is right with a calibrated probability, blurred when told so."""
    rng = np.random.default_rng(seed)
    difficulty = rng.beta(0.6, 1.0, size=(num_requests, 1))
    strength = np.array([0.25, 0.5, 0.75, 1.05])
    p_true = 1.0 / (1.0 + np.exp(-12.0 * (strength - difficulty)))
    right = (rng.random(p_true.shape) < p_true).astype(np.float64)
    p_right = p_true if informative else np.broadcast_to(p_true.mean(axis=0), p_true.shape).copy()
    # A tier is as good as the top where it is right, or where both are wrong.
    p_as_good = 1.0 - (1.0 - p_right) * p_right[:, -1:]
    return LabelledTraffic(p_right, p_as_good, right, np.broadcast_to(COSTS_USD, p_true.shape).copy())
