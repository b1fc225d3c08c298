"""What a request may say of where and how it is answered, as the log keeps it and as decisions read it."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gateway.api import fields
from gateway.api.fields import Check
from policies.types import Overrides

_MAX_REGIONS = 16
_MAX_REGION_CHARS = 64
_NAMES: Check = fields.strings(_MAX_REGIONS, _MAX_REGION_CHARS)


@fields.lets_through(fields.schema_of(_NAMES))
def read_regions(value: Any, param: str) -> tuple[str, ...]:
    """Names of regions, at least one: a list that was left empty by mistake must not mean "anywhere"."""
    names: tuple[str, ...] = _NAMES(value, param)
    if not names:
        raise fields.wrong_value(param, "at least one region", "an empty list")
    return names


@fields.lets_through(fields.schema_of(fields.amount))
def read_cost_limit(value: Any, param: str) -> str:
    """Dollars as a decimal string, which JSON keeps exact."""
    return format(fields.amount(value, param), "f")


def from_header(key: str, text: str) -> Any:
    """Header text as the JSON value it stands for."""
    if key == "explore" and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    if key.endswith("tier") and text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    if key == "regions":
        return [each.strip() for each in text.split(",")]
    return text


def overrides_of(given: Mapping[str, Any]) -> Overrides:
    """What bears on the decision of all that was given, whether just read or out of the log."""
    cost = given.get("max_cost_usd")
    return Overrides(
        tier=given.get("tier"),
        min_tier=given.get("min_tier"),
        max_tier=given.get("max_tier"),
        explore=given.get("explore", True),
        session_id=given.get("session_id"),
        regions=tuple(given.get("regions", ())),
        max_cost_usd=None if cost is None else Decimal(cost),
    )
