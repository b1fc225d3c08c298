"""A key's limits: how they are written, checked and stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gateway.api import fields
from gateway.api.fields import Check
from gateway.errors import InvalidRequest

_MOST = 10**12

CHECKS: Mapping[str, Check] = {
    "requests_per_minute": fields.integer(1, _MOST),
    "tokens_per_minute": fields.integer(1, _MOST),
    "budget_usd_per_day": fields.amount,
    "budget_usd_per_month": fields.amount,
}


_MEANINGS: Mapping[str, str] = {
    "requests_per_minute": "Most requests a minute.",
    "tokens_per_minute": "Most tokens of prompts and answers a minute.",
    "budget_usd_per_day": "Most dollars a day.",
    "budget_usd_per_month": "Most dollars a month.",
}


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may use; None means without limit. Minutes, days and months are those of the calendar, in UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budget_usd_per_day: Decimal | None = None
    budget_usd_per_month: Decimal | None = None

    def __bool__(self) -> bool:
        return self != NO_LIMITS

    def stored(self) -> dict[str, Any]:
        """As JSON for the database: only what is limited, amounts as text, which keeps them exact."""
        given = {name: getattr(self, name) for name in CHECKS}
        return {
            name: format(value, "f") if isinstance(value, Decimal) else value
            for name, value in given.items()
            if value is not None
        }


NO_LIMITS = KeyLimits()


@fields.lets_through(
    {
        "type": "object",
        "properties": {
            name: fields.schema_of(fields.nullable(check)) | {"description": _MEANINGS[name]}
            for name, check in CHECKS.items()
        },
        "additionalProperties": False,
    }
)
def read_limits(value: Any, param: str) -> KeyLimits:
    """The limits a JSON object states; null and absence mean none.

    Raises
    ------
    InvalidRequest
    """
    given = {}
    for name, each in fields.mapping(value, param).items():
        if name not in CHECKS:
            known = ", ".join(CHECKS)
            raise InvalidRequest(f"'{param}' has no limit {name[:80]!r}; it has {known}.", param=f"{param}.{name[:80]}")
        if each is not None:
            given[name] = CHECKS[name](each, f"{param}.{name}")
    return KeyLimits(**given)


def stored_limits(stored: Mapping[str, Any]) -> KeyLimits:
    """The limits a key's row holds."""
    return read_limits(dict(stored), "limits") if stored else NO_LIMITS
