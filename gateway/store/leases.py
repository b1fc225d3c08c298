"""Leases in the database: one holder at a time, by the database's own clock, with a token that only rises.

Holders' clocks need not agree: PostgreSQL judges by its own, and processes that share a SQLite file share a machine.
A lease does not stop a holder that sleeps through its end; whoever changes anything under a lease hands its token
along, and the change is refused when a later holder has been.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, literal, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from gateway.store.control_records import Lease
from gateway.store.store import Store
from gateway.store.tables import UtcDateTime, leases

_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


class LeaseStore:
    """Takes, renews and gives back. Methods raise :class:`StoreUnavailable` and its kinds."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        """Take a lease that nobody holds, or whose time is over; None while another holds it.

        Parameters
        ----------
        holder : different for every process and start, so that a token has one owner
        """
        make = sqlite_insert(leases) if self._store.dialect == "sqlite" else postgres_insert(leases)
        taken = make.values(name=name, holder=holder, expires_at=self._after(ttl_s), token=1)
        statement = taken.on_conflict_do_update(
            index_elements=["name"],
            set_={"holder": holder, "expires_at": self._after(ttl_s), "token": leases.c.token + 1},
            where=leases.c.expires_at < self._after(0.0),
        ).returning(*leases.c)
        return await self._one(statement)

    async def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """Hold it longer; None when it was lost. An expired lease that nobody took is still its holder's."""
        statement = update(leases).where(_is(lease)).values(expires_at=self._after(ttl_s)).returning(*leases.c)
        return await self._one(statement)

    async def release(self, lease: Lease) -> None:
        """Give it back for others to take at once. The row stays: its token must not begin anew."""
        async with self._store.transaction() as connection:
            await connection.execute(update(leases).where(_is(lease)).values(expires_at=_LONG_AGO))

    def _after(self, seconds: float) -> Any:
        if self._store.dialect == "sqlite":
            return literal(datetime.now(UTC) + timedelta(seconds=seconds), UtcDateTime)
        return func.clock_timestamp() + literal(timedelta(seconds=seconds))

    async def _one(self, statement: Any) -> Lease | None:
        async with self._store.transaction() as connection:
            row = (await connection.execute(statement)).mappings().first()
            return None if row is None else Lease(**row)


def _is(lease: Lease) -> Any:
    return (leases.c.name == lease.name) & (leases.c.holder == lease.holder) & (leases.c.token == lease.token)
