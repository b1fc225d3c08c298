"""The order of tiers: what makes a tier table sound, where its top is, and where its tiers are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from decimal import Decimal

from policies.errors import InvalidLadder
from policies.types import Tier

Ladder = tuple[Tier, ...]


def check_ladder(ladder: Ladder) -> None:
    """Refuse a tier table that routing could not work with.

    Raises
    ------
    InvalidLadder
        No tier; numbers that are not 1, 2, 3 … in order; a name given twice; a price below zero, or of a
        cached token above that of any other; a region that is no
        name, or two for one model.
    """
    if not ladder:
        raise InvalidLadder("tiers", "length", 0, "at least one tier")
    names: set[str] = set()
    regions: dict[str, str | None] = {}
    for place, tier in enumerate(ladder, start=1):
        if tier.index != place:
            raise InvalidLadder(tier.name, "index", tier.index, str(place))
        if tier.name in names:
            raise InvalidLadder(tier.name, "name", tier.name, "a name no other tier has")
        names.add(tier.name)
        for field_name, price in _prices(tier):
            if not price.is_finite() or price < 0:
                raise InvalidLadder(tier.name, field_name, str(price), "a finite amount of dollars, 0 or more")
        cached, fresh = tier.price_per_cached_token_usd, tier.price_per_input_token_usd
        if cached is not None and cached > fresh:
            expected = f"at most price_per_input_token_usd ({fresh})"
            raise InvalidLadder(tier.name, "price_per_cached_token_usd", str(cached), expected)
        if tier.context_length is not None and tier.context_length < 1:
            raise InvalidLadder(tier.name, "context_length", tier.context_length, "at least 1")
        if tier.region is not None and (problem := region_problem(tier.region)):
            raise InvalidLadder(tier.name, "region", tier.region, problem)
        if regions.setdefault(tier.model, tier.region) != tier.region:
            expected = f"{regions[tier.model]!r} as for the other tier of model {tier.model!r}"
            raise InvalidLadder(tier.name, "region", tier.region, expected)


def is_in_regions(tier: Tier, *limits: Collection[str]) -> bool:
    """Return whether a tier is in all of these lists of regions, of which an empty one permits any."""
    return all(not regions or tier.region in regions for regions in limits)


def region_problem(name: str) -> str | None:
    """Return what is wrong with the name of a region; None for a good one. Names must fit into a header's list."""
    if 0 < len(name) <= 64 and name.isascii() and name.isprintable() and not set(name) & set(" ,"):
        return None
    return "1 to 64 printable ASCII characters without spaces and commas"


def top(tiers: Iterable[int]) -> int:
    """Return the highest of some tiers: the one that quality is measured against, and the safe choice."""
    return max(tiers)


def _prices(tier: Tier) -> tuple[tuple[str, Decimal], ...]:
    return (
        ("price_per_request_usd", tier.price_per_request_usd),
        ("price_per_input_token_usd", tier.price_per_input_token_usd),
        ("price_per_cached_token_usd", tier.price_per_cached_token_usd or Decimal(0)),
        ("price_per_output_token_usd", tier.price_per_output_token_usd),
        ("price_per_compute_hour_usd", tier.price_per_compute_hour_usd),
    )
