"""Money: exact, additive, and whole when counted."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from policies.errors import InvalidLadder
from policies.ladder import check_ladder
from policies.policy import Policy
from policies.pricing import (
    embedding_price_usd,
    expected_cost_usd,
    from_nano_usd,
    measured_cost_usd,
    price_usd,
    switch_cost_usd,
    to_nano_usd,
)
from policies.types import RequestFacts, Tier

TIER = Tier(
    index=1,
    name="a",
    model="m",
    price_per_request_usd=Decimal("0.0001"),
    price_per_input_token_usd=Decimal("0.00000015"),
    price_per_output_token_usd=Decimal("0.0000006"),
    price_per_compute_hour_usd=Decimal("3.60"),
)


def test_price_is_exact() -> None:
    assert price_usd(TIER, 1_000, 2_000) == Decimal("0.00145")
    assert sum(price_usd(TIER, 1, 0) for _ in range(10)) == Decimal("0.0010015")


def test_measured_cost_is_the_hourly_price_pro_rata() -> None:
    assert measured_cost_usd(TIER, 0.5) == Decimal("0.0005")
    assert measured_cost_usd(TIER, 0.0) == 0


@given(st.integers(0, 10**18))
def test_nano_dollars_survive_the_round_trip(amount: int) -> None:
    assert to_nano_usd(from_nano_usd(amount)) == amount


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_price_adds_up_over_tokens(num_input: int, num_output: int) -> None:
    parts = price_usd(TIER, num_input, 0) + price_usd(TIER, 0, num_output) - TIER.price_per_request_usd
    assert price_usd(TIER, num_input, num_output) == parts


prices = st.decimals(0, 1, places=12)
counts = st.integers(0, 10**7)


@given(prices, prices, prices, prices, counts, counts, counts)
def test_a_bill_is_fresh_cached_and_output_tokens_exactly(
    request: Decimal, price: Decimal, other: Decimal, output: Decimal, fresh: int, cached: int, num_output: int
) -> None:
    dear, cheap = max(price, other), min(price, other)
    tier = Tier(1, "a", "m", request, dear, cheap, output)
    bill = price_usd(tier, fresh + cached, num_output, cached)
    assert bill == request + fresh * dear + cached * cheap + num_output * output
    assert to_nano_usd(bill) == round(bill * 10**9)
    # Without a price of their own cached tokens are tokens.
    plain = replace(tier, price_per_cached_token_usd=None)
    assert price_usd(plain, fresh + cached, num_output, cached) == price_usd(tier, fresh + cached, num_output)
    # No more of a prompt can be cached than it has.
    assert price_usd(tier, fresh, num_output, fresh + cached) == price_usd(tier, fresh, num_output, fresh)
    assert price_usd(tier, fresh, num_output, fresh + cached) >= request + num_output * output


def test_vectors_cost_their_tokens_alone() -> None:
    assert embedding_price_usd(TIER, 1000) == Decimal("0.00015")


@pytest.mark.parametrize("price", ["0.00000016", "-0.1", "NaN"])
def test_a_cached_token_costs_no_more_than_another(price: str) -> None:
    with pytest.raises(InvalidLadder, match="price_per_cached_token_usd"):
        check_ladder((replace(TIER, price_per_cached_token_usd=Decimal(price)),))
    check_ladder((replace(TIER, price_per_cached_token_usd=Decimal("0.00000015")),))


def test_expected_answer_is_no_longer_than_allowed() -> None:
    policy = Policy(expected_output_tokens=100)
    facts = RequestFacts(num_prompt_tokens=10, max_tokens=None, estimates=())
    assert expected_cost_usd(TIER, facts, policy) == price_usd(TIER, 10, 100)
    assert expected_cost_usd(TIER, structs.replace(facts, max_tokens=7), policy) == price_usd(TIER, 10, 7)


def test_expected_cost_includes_waiting() -> None:
    policy = Policy(wait_cost_per_s_usd=Decimal("0.01"))
    facts = RequestFacts(num_prompt_tokens=0, max_tokens=1, estimates=(), expected_wait_s={1: 2.5})
    assert expected_cost_usd(TIER, facts, policy) == price_usd(TIER, 0, 1) + Decimal("0.025")


def test_leaving_a_cache_costs_its_tokens() -> None:
    policy = Policy(switch_cost_per_cached_token_usd=Decimal("0.000001"))
    assert switch_cost_usd(TIER, 1000, policy) == Decimal("0.00115")
    # Where cached tokens have a price, leaving loses what they are cheaper.
    holder = replace(TIER, price_per_cached_token_usd=Decimal("0.00000005"))
    assert switch_cost_usd(holder, 1000, policy) == Decimal("0.0011")
    same = replace(TIER, price_per_cached_token_usd=TIER.price_per_input_token_usd)
    assert switch_cost_usd(same, 1000, policy) == Decimal("0.001")
