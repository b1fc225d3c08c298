"""Writes keys, alerts and evaluations for the administration, each with its audit entry.

A change and its entry are one transaction, so neither is there without the other. What a change rests on is read in the
same transaction, after its row was taken, so that two changes of one row see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.sql.schema import Table

from gateway.store.control_records import Alert, AuditEntry
from gateway.store.records import ApiKey
from gateway.store.rows import decode_key
from gateway.store.store import Store
from gateway.store.tables import admin_audit, alerts, api_keys, evaluations

Edit = tuple[Mapping[str, Any], AuditEntry]
"""Columns to be changed, and what the audit log says of it."""


class AdminWrites:
    """Writes that are no control rows. Methods raise :class:`StoreUnavailable` and its kinds, and change nothing then.

    An edit is made by a function of the row as it is, which may raise: nothing is changed then either.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def audit(self, entry: AuditEntry) -> None:
        """Write down what changed nothing: a check, or a change that was refused."""
        await self._insert(admin_audit, asdict(entry))

    async def insert_key(self, key: ApiKey, entry: AuditEntry) -> None:
        """Keep a new key."""
        values = {each.name: getattr(key, each.name) for each in fields(key)}
        await self._insert(api_keys, values, entry)

    async def change_key(self, key_id: str, edit: Callable[[ApiKey], Edit]) -> ApiKey | None:
        """Change a key. Returns it as it is then; None when there is no such key."""
        row = await self._change(api_keys, api_keys.c.key_id, key_id, lambda found: edit(decode_key(found)))
        return None if row is None else decode_key(row)

    async def change_alert(self, alert_id: str, edit: Callable[[Alert], Edit]) -> Alert | None:
        """Change an alert. Returns it as it is then; None when there is no such alert."""
        row = await self._change(alerts, alerts.c.alert_id, alert_id, lambda found: edit(Alert(**found)))
        return None if row is None else Alert(**row)

    async def insert_evaluation(
        self,
        evaluation_id: str,
        created_at: datetime,
        kind: str,
        subject: str,
        body: Mapping[str, Any],
        entry: AuditEntry,
    ) -> None:
        """Keep an estimate."""
        values = {"kind": kind, "subject": subject, "body": dict(body)}
        await self._insert(evaluations, {"evaluation_id": evaluation_id, "created_at": created_at, **values}, entry)

    async def _insert(self, table: Table, values: Mapping[str, Any], entry: AuditEntry | None = None) -> None:
        async with self._store.transaction() as connection:
            await connection.execute(insert(table), dict(values))
            if entry is not None:
                await connection.execute(insert(admin_audit), asdict(entry))

    async def _change(
        self, table: Table, column: Any, value: str, edit: Callable[[Mapping[str, Any]], Edit]
    ) -> Mapping[str, Any] | None:
        wanted = column == value
        async with self._store.transaction() as connection:
            # Takes the row in both databases; reading first would not, and in SQLite could not be turned into a write.
            if not (await connection.execute(update(table).where(wanted).values({column: column}))).rowcount:
                return None
            before = (await connection.execute(select(table).where(wanted))).mappings().one()
            values, entry = edit(dict(before))
            await connection.execute(update(table).where(wanted).values(**values))
            await connection.execute(insert(admin_audit), asdict(entry))
            return dict((await connection.execute(select(table).where(wanted))).mappings().one())
