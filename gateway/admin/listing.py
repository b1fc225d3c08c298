"""Lists entries, whole or by pages: a cursor is the id of the last entry seen, and ids sort by time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from gateway.admin.operation import AdminResponse
from gateway.api.declaration import JsonScalar, Words
from gateway.errors import InvalidRequest
from gateway.ids import is_uuid

T = TypeVar("T")


class Listing(Struct, Generic[T], kw_only=True):
    """A listing that is always whole."""

    object: Literal["list"] = "list"
    data: Sequence[T]


class Page(Struct, Generic[T], kw_only=True):
    """One page of a listing; `next` is the cursor of the next page, null on the last."""

    object: Literal["list"] = "list"
    data: Sequence[T]
    next: str | None


def _wrong_cursor(value: Any, param: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': expected the 'next' of another page.", param=param)


class Cursor(str, JsonScalar):
    """Names the entry after which a page begins."""

    words = Words(kind="a string", error=_wrong_cursor)
    json_schema: ClassVar = {"type": "string", "format": "uuid"}

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        if not isinstance(value, str) or not is_uuid(value):
            raise ValueError
        return cls(value)


PageLimit = Annotated[int, Meta(ge=1, le=500, description="Most entries of a page.")]
PageCursor = Annotated[Cursor, Meta(description="The `next` of the page before; entries come newest first.")]


class PageQuery(Protocol):
    """A query of a page, as far as the page rests on it."""

    @property
    def limit(self) -> int: ...

    @property
    def cursor(self) -> str | None: ...


def page_bounds(query: PageQuery) -> dict[str, Any]:
    """Return the bounds of a read: one entry more than the page has tells whether there is a next one."""
    return {"limit": query.limit + 1, "before_id": query.cursor}


def page_response(entries: Sequence[Any], query: PageQuery, id_name: str = "id") -> AdminResponse:
    """Return a page of entries of which one more than ``limit`` was read."""
    data = list(entries[: query.limit])
    is_last = len(entries) <= query.limit
    return AdminResponse(Page(data=data, next=None if is_last else _id_of(data[-1], id_name)))


def _id_of(entry: Any, id_name: str) -> str:
    found: str = (entry if isinstance(entry, dict) else msgspec.structs.asdict(entry))[id_name]
    return found
