"""Prices a request at a tier: by its price table, and by the device seconds it took. Exact decimal arithmetic."""

from __future__ import annotations

from decimal import Decimal

from policies.policy import Policy
from policies.types import RequestFacts, Tier

NANO_USD_PER_USD = 1_000_000_000
SECONDS_PER_HOUR = 3600


def price_usd(tier: Tier, num_input_tokens: int, num_output_tokens: int, num_cached_tokens: int = 0) -> Decimal:
    """Return price of one answer by the tier's table: per request, per fresh, cached and output token.

    ``num_cached_tokens`` are those of the input that came from a cache; no more of it can have.
    """
    price = (
        tier.price_per_request_usd
        + tier.price_per_input_token_usd * num_input_tokens
        + tier.price_per_output_token_usd * num_output_tokens
    )
    if num_cached_tokens and tier.price_per_cached_token_usd is not None:
        saved = tier.price_per_input_token_usd - tier.price_per_cached_token_usd
        price -= saved * min(num_cached_tokens, num_input_tokens)
    return price


def embedding_price_usd(tier: Tier, num_tokens: int) -> Decimal:
    """Return price of reading texts for their vectors: the tokens are paid for, the price of an answer is not."""
    return tier.price_per_input_token_usd * num_tokens


def measured_cost_usd(tier: Tier, compute_s: float) -> Decimal:
    """Return cost of the device seconds a request really used, at the tier's hourly price of the device."""
    return tier.price_per_compute_hour_usd * Decimal(repr(compute_s)) / SECONDS_PER_HOUR


def to_nano_usd(amount_usd: Decimal) -> int:
    """Return dollars as whole billionths, halves rounded to even: the form in which amounts are counted and stored."""
    return int((amount_usd * NANO_USD_PER_USD).to_integral_value())


def from_nano_usd(amount_nano_usd: int) -> Decimal:
    """Whole billionths as dollars, exactly."""
    return Decimal(amount_nano_usd) / NANO_USD_PER_USD


def expected_cost_usd(tier: Tier, facts: RequestFacts, policy: Policy) -> Decimal:
    """Return what serving this request at this tier would cost, before the answer's length is known.

    The price of one answer by the table, and the price of the expected waiting.
    """
    price = _expected_price_usd(tier, facts, policy)
    if not policy.wait_cost_per_s_usd:
        return price
    return price + policy.wait_cost_per_s_usd * Decimal(repr(facts.expected_wait_s.get(tier.index, 0.0)))


def expected_bill_usd(tier: Tier, facts: RequestFacts, policy: Policy) -> Decimal:
    """Return what this request is expected to be billed at this tier, with all the answers it asks for."""
    return _expected_price_usd(tier, facts, policy) * facts.num_answers


def _expected_price_usd(tier: Tier, facts: RequestFacts, policy: Policy) -> Decimal:
    """Return the price by the table: the prompt as counted, the answer as long as policy and request let one expect."""
    num_input_tokens, num_output_tokens = facts.num_prompt_tokens, policy.expected_output_tokens
    if facts.max_tokens is not None:
        num_output_tokens = min(num_output_tokens, facts.max_tokens)
    if num_input_tokens is None:
        num_input_tokens = facts.guessed_prompt_tokens
    return price_usd(tier, num_input_tokens, num_output_tokens)


def switch_cost_usd(holder: Tier, cached_tokens: int, policy: Policy) -> Decimal:
    """Return the cost of leaving the tier whose KV cache holds a conversation: what its tokens are cheaper there.

    A tier without a price for cached tokens is taken to read them for nothing.
    """
    saved_usd = holder.price_per_input_token_usd - (holder.price_per_cached_token_usd or 0)
    return cached_tokens * (policy.switch_cost_per_cached_token_usd + saved_usd)
