"""Pages of listings: a cursor is the id of the last entry seen, and ids sort by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.admin.operation import Asked, Field, Fields, Reply
from gateway.api import fields
from gateway.api.fields import lets_through
from gateway.errors import InvalidRequest
from gateway.ids import is_uuid

_MOST = 500


@lets_through({"type": "string", "format": "uuid"})
def cursor(value: Any, param: str) -> str:
    """The ``next`` of the page before."""
    if not isinstance(value, str) or not is_uuid(value):
        raise InvalidRequest(f"Invalid value for '{param}': expected the 'next' of another page.", param=param)
    return value


PAGING: Fields = {
    "limit": Field(fields.integer(1, _MOST), "Most entries of a page.", 50),
    "cursor": Field(cursor, "The `next` of the page before; entries come newest first."),
}


def page_reply(entries: Sequence[Mapping[str, Any]], asked: Asked, id_name: str = "id") -> Reply:
    """A page of entries of which one more than ``limit`` was read."""
    limit = asked.query["limit"]
    data = list(entries[:limit])
    return Reply({"object": "list", "data": data, "next": data[-1][id_name] if len(entries) > limit else None})
