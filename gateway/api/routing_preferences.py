"""Decodes what a request asks of its routing: the ``suffice`` object and the ``x-suffice-*`` headers."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from msgspec import Meta, ValidationError, convert
from msgspec.structs import fields

from backends.protocol import Priority
from gateway.api.declaration import (
    ClosedShape,
    Dollars,
    Words,
    explain,
    fits,
    given_type,
    limited,
    read_scalar,
    schema_of,
    wrong_value,
)
from gateway.api.request import RoutingPreferences
from gateway.errors import InvalidRequest
from policies.types import EVERYTHING, Overrides, Permissions


def _no_region(value: Any, param: str) -> InvalidRequest | None:
    # A list that was left empty by mistake must not mean "anywhere".
    return wrong_value(param, "at least one region", "an empty list") if value == [] else None


Name = Annotated[str, Meta(min_length=1, max_length=256)]
RegionName = Annotated[str, Meta(min_length=1, max_length=64)]
RegionList = Annotated[tuple[RegionName, ...], Meta(min_length=1, max_length=16)]
Regions = Annotated[
    RegionName | Annotated[RegionList, Words(items="strings")],
    Words(kind="a string or an array of strings", error=_no_region),
]


class RoutingOptions(ClosedShape, frozen=True, kw_only=True):
    """What a request asks of its routing. Tiers go by name or number."""

    member = "option"

    tier: int | str | None = None
    min_tier: int | str | None = None
    max_tier: int | str | None = None
    explore: bool | None = None
    session_id: Name | None = None
    policy: Name | None = None
    priority: Literal["live", "background"] | None = None
    regions: Regions | None = None
    max_cost_usd: Dollars | None = None


class PreferenceDecoder:
    """Reads routing preferences for the tiers of one ladder.

    Parameters
    ----------
    tier_numbers : tier's name -> its number; preferences may use either
    """

    def __init__(self, tier_numbers: Mapping[str, int]) -> None:
        self._tier_numbers = tier_numbers
        number: Any = Annotated[int, Meta(ge=1, le=len(tier_numbers))]
        tier: Any = Annotated[number | Literal[tuple(tier_numbers)], Words(kind="an integer", error=self._unknown_tier)]
        self.shape = limited(RoutingOptions, tier=tier, min_tier=tier, max_tier=tier)
        self._types = {each.name: each.type for each in fields(self.shape)}

    def __call__(
        self, own: RoutingOptions | None, headers: Mapping[str, str], *, is_background: bool
    ) -> RoutingPreferences:
        """Return what body and headers say; where both say something, the body decides.

        Raises
        ------
        InvalidRequest
        """
        given: dict[str, Any] = {"priority": "background"} if is_background else {}
        for said in (self._checked(headers), own):
            if said is not None:
                for key in self._types:
                    if (value := getattr(said, key)) is not None:
                        given[key] = self._logged(key, value)
        return RoutingPreferences(
            overrides_of(given), given.get("policy"), Priority(given.get("priority", "live")), given
        )

    def header_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON Schema of every ``x-suffice-*`` request header."""
        # Unlike a member of a body, a header cannot be null.
        return {_header(name): schema_of(given_type(each)) for name, each in self._types.items()}

    def _checked(self, headers: Mapping[str, str]) -> RoutingOptions | None:
        if not headers:
            return None
        raw = {key: from_header(key, text) for key, text in headers.items()}
        try:
            return convert(raw, self.shape, dec_hook=read_scalar)
        except ValidationError:
            wrong = next(key for key, value in raw.items() if not fits(value, self._types[key]))
            raise explain(raw[wrong], self._types[wrong], _header(wrong)) from None

    def _logged(self, key: str, value: Any) -> Any:
        """Return a preference as the log keeps it."""
        if key.endswith("tier") and isinstance(value, str):
            return self._tier_numbers[value]
        if key == "regions":
            return named_regions(value)
        # A decimal string, which JSON keeps exact.
        return format(value, "f") if key == "max_cost_usd" else value

    def _unknown_tier(self, value: Any, param: str) -> InvalidRequest | None:
        if not isinstance(value, str):
            return None
        names = ", ".join(self._tier_numbers)
        return InvalidRequest(f"'{param}' is {value[:80]!r}; the tiers are {names}.", param=param, code="unknown_tier")


def _header(name: str) -> str:
    return f"x-suffice-{name.replace('_', '-')}"


def named_regions(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return regions as a tuple, whether one or several were named."""
    return (given,) if isinstance(given, str) else given


def from_header(key: str, text: str) -> Any:
    """Return a header's text as the JSON value it stands for."""
    if key == "explore" and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    if key.endswith("tier") and text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    if key == "regions":
        return [each.strip() for each in text.split(",")]
    return text


def overrides_of(given: Mapping[str, Any]) -> Overrides:
    """Return what bears on the decision of all that was given, whether just read or out of the log."""
    cost, permissions = given.get("max_cost_usd"), given.get("permissions")
    return Overrides(
        tier=given.get("tier"),
        min_tier=given.get("min_tier"),
        max_tier=given.get("max_tier"),
        explore=given.get("explore", True),
        session_id=given.get("session_id"),
        regions=tuple(given.get("regions", ())),
        max_cost_usd=None if cost is None else Decimal(cost),
        # Of the caller's key, which the log keeps beside what was asked.
        permissions=Permissions(**{k: tuple(each) for k, each in permissions.items()}) if permissions else EVERYTHING,
    )
