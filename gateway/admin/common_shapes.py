"""Declares what several operations take: names, times, and which rows of the log."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from gateway.admin.operation import AdminShape
from gateway.api.declaration import JsonScalar, Words
from gateway.store.admin_queries import RequestFilter

_MAX_MOMENT_CHARS = 40
_FIRST_YEAR, _LAST_YEAR = 3, 9996


class Moment(datetime, JsonScalar):
    """A time with its zone, written as in RFC 3339."""

    words = Words(kind="a string", value="a moment such as 2026-01-31T12:00:00Z")
    json_schema: ClassVar = {"type": "string", "format": "date-time"}

    @classmethod
    def from_json(cls, value: Any) -> Moment:
        if not isinstance(value, str):
            raise TypeError
        parsed = cls.fromisoformat(value) if len(value) <= _MAX_MOMENT_CHARS else None
        # A zone moves the outermost years beyond the calendar, and windows reach to both sides.
        if parsed is None or parsed.tzinfo is None or not _FIRST_YEAR <= parsed.year <= _LAST_YEAR:
            raise ValueError
        return parsed


Name = Annotated[str, Meta(min_length=1, max_length=256)]
TierNumber = Annotated[int, Meta(ge=1, le=1000)]
OfTenant = Annotated[Name, Meta(description="Of this tenant.")]
WithKey = Annotated[Name, Meta(description="Made with this key.")]
ByPolicy = Annotated[Name, Meta(description="Decided by this policy.")]
ByTier = Annotated[TierNumber, Meta(description="Answered by this tier.")]
ByRouter = Annotated[Name, Meta(description="Estimated by this router.")]
Since = Annotated[Moment, Meta(description="Accepted at or after this moment.")]
Until = Annotated[Moment, Meta(description="Accepted before this moment.")]


class ReasonBody(AdminShape, frozen=True):
    """The words that a change is made with."""

    reason: Annotated[str, Meta(max_length=500, description="Why, for the history.")] = ""


def filter_of(query: AdminShape) -> RequestFilter:
    """Return the rows that a query states; what it does not declare is not filtered by."""
    return RequestFilter(**{each.name: getattr(query, each.name, None) for each in dataclasses.fields(RequestFilter)})
