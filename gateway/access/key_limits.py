"""Declares a key's limits: how they are written, checked and stored."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

from msgspec import Meta

from gateway.api.declaration import ClosedShape, Dollars, checked

_MOST = 10**12

Count = Annotated[int, Meta(ge=1, le=_MOST)]


class KeyLimits(ClosedShape, frozen=True):
    """What one key may use; None means without limit. Minutes, days and months are those of the calendar, in UTC."""

    member = "limit"

    requests_per_minute: Annotated[Count | None, Meta(description="Most requests a minute.")] = None
    tokens_per_minute: Annotated[Count | None, Meta(description="Most tokens of prompts and answers a minute.")] = None
    budget_usd_per_day: Annotated[Dollars | None, Meta(description="Most dollars a day.")] = None
    budget_usd_per_month: Annotated[Dollars | None, Meta(description="Most dollars a month.")] = None
    max_concurrency: Annotated[Count | None, Meta(description="Most requests of this key at once.")] = None
    max_tenant_concurrency: Annotated[
        Count | None, Meta(description="Most requests of its tenant at once, when this key asks.")
    ] = None

    def __bool__(self) -> bool:
        return self != NO_LIMITS

    def stored(self) -> dict[str, Any]:
        """Return JSON for the database: only what is limited, amounts as text, which keeps them exact."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: format(value, "f") if isinstance(value, Decimal) else value
            for name, value in given.items()
            if value is not None
        }


NO_LIMITS = KeyLimits()


def read_limits(value: Any, param: str) -> KeyLimits:
    """Return the limits a JSON object states; null and absence mean none.

    Raises
    ------
    InvalidRequest
    """
    return checked(value, KeyLimits, param)


def stored_limits(stored: Mapping[str, Any]) -> KeyLimits:
    """Return the limits a key's row holds."""
    return read_limits(dict(stored), "limits") if stored else NO_LIMITS
