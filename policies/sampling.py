"""Which answers are to be checked against the top tier, and with what known probability."""

from __future__ import annotations

from policies.ladder import Ladder
from policies.policy import Policy


def inclusion_probability(policy: Policy, final_tier: int, ladder: Ladder) -> float:
    """Probability with which an answer of ``final_tier`` is drawn for verification.

    Stored with the request's row, so that a rate measured on the drawn answers can be weighted back to all of them.
    The top tier is what the others are checked against, so its own answers are never drawn.
    """
    return 0.0 if final_tier == ladder[-1].index else policy.sampling_share
