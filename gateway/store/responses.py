"""Reads and deletes kept answers of ``/v1/responses``, each within its tenant. Their requests' rows bring them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, literal, select

from gateway.store.records import ResponseRecord
from gateway.store.rows import clean_text, decode_response
from gateway.store.store import Store
from gateway.store.tables import requests, responses

MAX_CHAINED = 1_000
"""Responses that one may go on from, and itself."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and what its request called its conversation."""

    record: ResponseRecord
    session_id: str | None


class ResponseBook:
    """The table ``responses`` of one database.

    Another tenant's response, one that was deleted and one that never was are the same: one look-up finds nothing.

    Parameters
    ----------
    store : the open database
    readable_days : what is older is not there any more; for ever when None
    """

    def __init__(
        self,
        store: Store,
        readable_days: float | None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._life = None if readable_days is None else timedelta(days=readable_days)
        self._now = now

    async def get(self, tenant: str, request_id: str) -> KeptResponse | None:
        """Return a response by its request's id.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        joined = responses.join(requests, responses.c.request_id == requests.c.request_id)
        wanted = select(*responses.c, requests.c.session_id).select_from(joined)
        wanted = wanted.where(responses.c.request_id == request_id, self._is_readable(tenant))
        async with self._store.transaction() as connection:
            row = (await connection.execute(wanted)).mappings().first()
        if row is None:
            return None
        fields = dict(row)
        session_id = fields.pop("session_id")
        return KeptResponse(decode_response(fields), session_id)

    async def chain(self, newest: ResponseRecord) -> list[ResponseRecord] | None:
        """Return what a response goes on from, oldest first, and itself; None where a part of that is gone.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        if newest.previous_id is None:
            return [newest]
        is_readable, column = self._is_readable(newest.tenant), responses.c
        first = select(column.request_id, column.previous_id, literal(1).label("place"))
        walk = first.where(column.request_id == newest.previous_id, is_readable).cte("walk", recursive=True)
        earlier = select(column.request_id, column.previous_id, walk.c.place + 1)
        is_next = and_(column.request_id == walk.c.previous_id, walk.c.place < MAX_CHAINED)
        walk = walk.union_all(earlier.where(is_next, is_readable))
        wanted = select(*responses.c).join(walk, column.request_id == walk.c.request_id)
        async with self._store.transaction() as connection:
            rows = (await connection.execute(wanted.order_by(walk.c.place.desc()))).mappings().all()
        # Each knows how many there were.
        return None if len(rows) + 1 != newest.num_chained else [*(decode_response(dict(row)) for row in rows), newest]

    async def delete(self, tenant: str, request_id: str) -> bool:
        """Delete a response; False where there is none.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        which = and_(responses.c.request_id == request_id, self._is_readable(tenant))
        async with self._store.transaction() as connection:
            is_deleted = (await connection.execute(delete(responses).where(which))).rowcount > 0
        if is_deleted:
            self._store.num_forgotten += 1
        return is_deleted

    def _is_readable(self, tenant: str) -> ColumnElement[bool]:
        is_own: ColumnElement[Any] = responses.c.tenant == clean_text(tenant)
        return is_own if self._life is None else and_(is_own, responses.c.created_at >= self._now() - self._life)
