"""Erases what the log holds of one tenant, key, conversation or request, from every table, in small transactions.

It protects against readers of the database and, in SQLite, of its files (:meth:`gateway.store.store.Store.scrub`). It
does not reach backups, what a router learnt from many texts, nor a request that ends while it runs: run it again once
such requests have ended. Keys and policies are the administrators' own and stay, and so does a tenant's name in them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, Table, and_, delete, func, select

from gateway.store.rows import clean_text
from gateway.store.store import Store
from gateway.store.tables import (
    feedback,
    gold_labels,
    request_texts,
    requests,
    responses,
    sessions,
    shadow_decisions,
    verification_texts,
    verifications,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_AT_ONCE = 500
_PAUSE_S = 0.01
# Children before their parents, so that each table's own count is known.
_BY_REQUEST = (gold_labels, feedback, verifications, shadow_decisions, responses, request_texts, requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureTarget:
    """Whose rows: exactly one is given, but a tenant may narrow a session (two tenants may use one name)."""

    tenant: str | None = None
    key_id: str | None = None
    session_id: str | None = None
    request_id: str | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it says one thing."""
        given = [name for name in ("tenant", "key_id", "session_id", "request_id") if getattr(self, name) is not None]
        return len(given) == 1 or given == ["tenant", "session_id"]

    def subject(self, store: Store) -> str:
        """Return what the audit log says was erased: our own ids as they are, names given by others as keyed digests.

        Who knows the name can tell that it was erased; the name itself is kept nowhere.
        """
        if self.request_id is not None:
            return f"request {self.request_id}"
        if self.key_id is not None:
            return f"key {self.key_id}"
        named = (("tenant", self.tenant), ("session", self.session_id))
        return " ".join(f"{kind} {store.digest(value)[:16]}" for kind, value in named if value is not None)

    def conditions(self, table: Table) -> list[ColumnElement[bool]]:
        """Return what holds for its rows of a table, by the columns that the table has."""
        which = [
            table.c[name] == clean_text(value)
            for name in ("tenant", "key_id", "request_id")
            if (value := getattr(self, name)) is not None
        ]
        if self.session_id is not None:
            session = clean_text(self.session_id)
            # An agent's own agents are conversations of their own, named after it.
            # Not LIKE, to which SQLite's letters are one whether large or small.
            agents = func.substr(table.c.session_id, 1, len(session) + 1) == f"{session}/"
            which.append((table.c.session_id == session) | agents)
        return which


class Eraser:
    """Erases from one database.

    Parameters
    ----------
    store : the open database
    pause_s : between two transactions
    """

    def __init__(self, store: Store, pause_s: float = _PAUSE_S) -> None:
        self._store = store
        self._pause_s = pause_s

    async def erase(self, target: ErasureTarget) -> dict[str, int]:
        """Delete, and return from which table how many rows. May be repeated.

        Raises
        ------
        StoreUnavailable and its kinds
            Part may be gone by then; say it again.
        """
        assert target.is_sound, "checked where it was read"
        counts: Counter[str] = Counter({each.name: 0 for each in (*_BY_REQUEST, verification_texts, sessions)})
        column = requests.c
        chosen = select(column.request_id, column.tenant, column.session_id).where(*target.conditions(requests))
        while True:
            async with self._store.transaction() as connection:
                found = (await connection.execute(chosen.limit(_AT_ONCE))).all()
                await _delete_requests(connection, [row.request_id for row in found], counts)
                for tenant, session_id in {(row.tenant, row.session_id) for row in found if row.session_id is not None}:
                    await _delete_session(connection, tenant, session_id, counts)
            if len(found) < _AT_ONCE:
                break
            await asyncio.sleep(self._pause_s)
        await self._delete_others(target, counts)
        return dict(counts)

    async def _delete_others(self, target: ErasureTarget, counts: Counter[str]) -> None:
        """Delete what hangs on no row of the target: its reports about others' requests, its conversations."""
        async with self._store.transaction() as connection:
            if target.session_id is None and target.request_id is None:
                await _count(connection, feedback, and_(*target.conditions(feedback)), counts)
            if target.key_id is None and target.request_id is None:
                await _count(connection, sessions, and_(*target.conditions(sessions)), counts)


async def _delete_requests(connection: AsyncConnection, ids: Sequence[str], counts: Counter[str]) -> None:
    if not ids:
        return
    checks = select(verifications.c.verification_id).where(verifications.c.request_id.in_(ids))
    await _count(connection, verification_texts, verification_texts.c.verification_id.in_(checks), counts)
    for table in _BY_REQUEST:
        await _count(connection, table, table.c.request_id.in_(ids), counts)


async def _delete_session(connection: AsyncConnection, tenant: str, session_id: str, counts: Counter[str]) -> None:
    """Delete a conversation of which no row is left."""
    column = requests.c
    is_left = select(column.request_id).where(column.tenant == tenant, column.session_id == session_id).limit(1)
    if (await connection.execute(is_left)).first() is None:
        which = and_(sessions.c.tenant == tenant, sessions.c.session_id == session_id)
        await _count(connection, sessions, which, counts)


async def _count(connection: AsyncConnection, table: Table, which: ColumnElement[bool], counts: Counter[str]) -> None:
    deleted = await connection.execute(delete(table).where(which))
    counts[table.name] += deleted.rowcount
