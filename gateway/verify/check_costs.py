"""Prices a pass through a model: by its device seconds where they are measured, else by the price table."""

from __future__ import annotations

from backends.protocol import Finished, Usage
from gateway.store.verifications import Spent
from policies.pricing import measured_cost_usd, price_usd
from policies.types import Tier


def priced(tier: Tier, usage: Usage, compute_s: float) -> Spent:
    """Return dollars and device seconds of one pass.

    A tier whose device has a price an hour costs what it took of it: a check runs on what is there anyway. Others, such
    as hosted ones, cost what their price table says for the tokens.
    """
    if compute_s > 0.0 and tier.price_per_compute_hour_usd > 0:
        return Spent(measured_cost_usd(tier, compute_s), compute_s)
    return Spent(price_usd(tier, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), compute_s)


def priced_ending(tier: Tier, ending: Finished) -> Spent:
    """Return the cost of a generation, however it ended. One cut off before it began took nothing of a device."""
    if ending.compute_measured and tier.price_per_compute_hour_usd > 0:
        return Spent(measured_cost_usd(tier, ending.compute_s), ending.compute_s)
    return priced(tier, ending.usage, ending.compute_s)
