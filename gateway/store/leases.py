"""Leases in the database: one holder at a time, by the database's own clock, with a token that only rises.

Holders' clocks need not agree: PostgreSQL judges by its own, and processes that share a SQLite file share a machine.
A lease does not stop a holder that sleeps through its end; whoever changes anything under a lease hands its token
along, and the change is refused when a later holder has been.

A clock that was ahead, and was set right, leaves a lease that would run for years. One that ends later than any holder
could have asked for counts as over; where its holder lives after all, its token is refused from then on.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from gateway.store.control_records import Lease
from gateway.store.store import Store
from gateway.store.tables import UtcDateTime, leases

_log = logging.getLogger("suffice.leases")

_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
# Holders may be set up with different lengths; a longer one than twice one's own and this is no lease's.
_LONGEST_S = 600.0


def longest_lease_s(ttl_s: float) -> float:
    """Return the seconds from now after which no lease ends that was taken by a clock that is right.

    Parameters
    ----------
    ttl_s : how long one's own leases last
    """
    return max(_LONGEST_S, 2.0 * ttl_s)


class LeaseStore:
    """Takes, renews and gives back. Methods raise :class:`StoreUnavailable` and its kinds."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        """Take a lease that nobody holds, or whose time is over or cannot be right; None while another holds it.

        Parameters
        ----------
        holder : different for every process and start, so that a token has one owner
        """
        make = sqlite_insert(leases) if self._store.dialect == "sqlite" else postgres_insert(leases)
        taken = make.values(name=name, holder=holder, expires_at=self._after(ttl_s), token=1)
        is_ahead = leases.c.expires_at > self._after(longest_lease_s(ttl_s))
        statement = taken.on_conflict_do_update(
            index_elements=["name"],
            set_={"holder": holder, "expires_at": self._after(ttl_s), "token": leases.c.token + 1},
            where=or_(leases.c.expires_at < self._after(0.0), is_ahead),
        ).returning(*leases.c)
        async with self._store.transaction() as connection:
            found = select(leases.c.holder, leases.c.expires_at).where(leases.c.name == name, is_ahead)
            ahead = (await connection.execute(found)).first()
            row = (await connection.execute(statement)).mappings().first()
        if row is None:
            return None
        if ahead is not None:
            _log.warning(
                "the lease %r of %s, said to run until %s, was taken over: it was left by a clock that was ahead",
                *(name, ahead.holder, f"{ahead.expires_at:%Y-%m-%d %H:%M:%S}"),
            )
        return Lease(**row)

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
