"""Changes the active state: one transaction with its audit entry, then word to the other servers.

Changes are serialised by the database, so each sees the state it changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from gateway.control.control_state import ControlState
from gateway.control.errors import Conflict, LeaseLost
from gateway.store.control import ControlStore, ControlTransaction
from gateway.store.control_records import AuditEntry, Lease

Publish = Callable[[int], Awaitable[None]]
"""Tells the other servers the number of a change; must not raise."""

Audit = Callable[[ControlState], AuditEntry]
"""The audit entry of a change, made from the state that the change found: what was read before may be old."""


async def tell_nobody(generation: int) -> None:
    """One server alone finds its own changes by looking."""


class AuditedChange:
    """One change under way: the state it began from, and what it writes."""

    def __init__(self, transaction: ControlTransaction, rows: Any, by: str) -> None:
        self.transaction = transaction
        self.before = ControlState.decode(rows)
        self.by = by

    async def put(self, name: str, value: Mapping[str, Any]) -> None:
        await self.transaction.put(name, value, self.by)

    async def execute(self, statement: Any) -> int:
        """Return rows that a statement touched."""
        return int((await self.transaction.connection.execute(statement)).rowcount)

    async def is_there(self, statement: Any) -> bool:
        return (await self.transaction.connection.execute(statement)).first() is not None


class ChangeMaker:
    """Makes changes, of every kind, with their audit entry.

    Parameters
    ----------
    store : the control tables
    publish : called after each commit
    clock : wall clock, aware
    """

    def __init__(self, store: ControlStore, publish: Publish, clock: Callable[[], datetime]) -> None:
        self.store = store
        self.publish = publish
        self.clock = clock

    @asynccontextmanager
    async def change(
        self,
        by: str,
        *,
        row: str | None = None,
        expected_version: int | None = None,
        audit: Audit | None = None,
        lease: Lease | None = None,
    ) -> AsyncIterator[AuditedChange]:
        """A change made by hand: what is done through it, the audit entry and the new generation are one.

        Parameters
        ----------
        by : who, for the row
        row, expected_version : refuse unless this row has this version
        audit : its entry is written in the same transaction
        lease : refuse unless it is still held (the fencing token)

        Raises
        ------
        Conflict, LeaseLost, StoreUnavailable and its kinds
        """
        async with self.store.change(self.clock()) as transaction:
            rows = await transaction.rows()
            if row is not None and expected_version is not None:
                found = rows[row][1] if row in rows else 0
                if found != expected_version:
                    raise Conflict(row, expected_version, found)
            if lease is not None and not await transaction.holds(lease):
                raise LeaseLost(lease.name)
            change = AuditedChange(transaction, rows, by)
            yield change
            if audit is not None:
                await transaction.audit(audit(change.before))
        await self.publish(transaction.generation)
