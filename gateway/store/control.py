"""The control tables: read in one statement, changed in one transaction under one lock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.control_records import Alert, AuditEntry, Lease, RolloutRow, RouterVersion, ShadowDecision
from gateway.store.store import Store
from gateway.store.tables import admin_audit, alerts, control, leases, rollouts, router_versions, shadow_decisions

_GENERATION = "generation"

Rows = Mapping[str, tuple[Mapping[str, Any], int]]
"""Row's name -> (value, version)."""


class ControlTransaction:
    """One change. Whatever is done through it is committed together or not at all.

    Attributes
    ----------
    connection : for what lives in other tables
    generation : the number of this change
    now : its moment
    """

    def __init__(self, connection: AsyncConnection, dialect: str, generation: int, now: datetime) -> None:
        self.connection = connection
        self.generation = generation
        self.now = now
        self._dialect = dialect

    def insert(self, table: Any) -> Any:
        """An ``INSERT`` that knows ``on_conflict_do_…``."""
        return sqlite_insert(table) if self._dialect == "sqlite" else postgres_insert(table)

    async def rows(self) -> Rows:
        """All control rows, as this change finds them."""
        return _by_name((await self.connection.execute(select(control))).mappings().all())

    async def put(self, name: str, value: Mapping[str, Any], by: str) -> None:
        """Write one row and raise its version."""
        written = {"value": dict(value), "updated_at": self.now, "updated_by": by}
        statement = self.insert(control).values(name=name, version=1, **written)
        raised = {**written, "version": control.c.version + 1}
        await self.connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=raised))

    async def holds(self, lease: Lease) -> bool:
        """Whether nobody else has taken this lease since, nor can before this transaction ends."""
        return await _holds(self.connection, lease)

    async def audit(self, entry: AuditEntry) -> None:
        """Write what was done beside what it did."""
        await self.connection.execute(insert(admin_audit).values(**asdict(entry)))


class ControlStore:
    """Reads and changes of what is in force. Methods raise :class:`StoreUnavailable` and its kinds."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @asynccontextmanager
    async def change(self, now: datetime) -> AsyncIterator[ControlTransaction]:
        """A transaction that waits for every other change: its first statement takes the generation's row."""
        async with self.store.transaction() as connection:
            dialect = self.store.dialect
            make = sqlite_insert(control) if dialect == "sqlite" else postgres_insert(control)
            first = make.values(name=_GENERATION, value={}, version=1, updated_at=now, updated_by="")
            raised = first.on_conflict_do_update(
                index_elements=["name"], set_={"version": control.c.version + 1, "updated_at": now}
            )
            generation = (await connection.execute(raised.returning(control.c.version))).scalar_one()
            yield ControlTransaction(connection, dialect, int(generation), now)

    async def generation(self) -> int:
        """The number of the last change; 0 before the first."""
        async with self.store.transaction() as connection:
            found = await connection.execute(select(control.c.version).where(control.c.name == _GENERATION))
            return int(found.scalar() or 0)

    async def rows(self) -> Rows:
        """All control rows, by one statement and so of one moment."""
        async with self.store.transaction() as connection:
            return _by_name((await connection.execute(select(control))).mappings().all())

    async def put_quietly(self, name: str, value: Mapping[str, Any], by: str, now: datetime, lease: Lease) -> None:
        """Write a row that no server is told of, such as where the monitor stands; nothing once the lease is lost."""
        async with self.store.transaction() as connection:
            transaction = ControlTransaction(connection, self.store.dialect, 0, now)
            if await transaction.holds(lease):
                await transaction.put(name, value, by)

    # ---- routers

    async def router_bytes(self, version: str) -> bytes | None:
        """The artifact of a router."""
        async with self.store.transaction() as connection:
            wanted = select(router_versions.c.artifact).where(router_versions.c.version == version)
            found = (await connection.execute(wanted)).scalar()
            return None if found is None else bytes(found)

    async def get_router(self, version: str) -> RouterVersion | None:
        rows = await self._routers(router_versions.c.version == version, 1)
        return rows[0] if rows else None

    async def list_routers(self, limit: int = 100) -> list[RouterVersion]:
        """Newest first."""
        return await self._routers(None, limit)

    async def _routers(self, wanted: Any, limit: int) -> list[RouterVersion]:
        columns = [each for each in router_versions.c if each.name != "artifact"]
        statement = select(*columns).order_by(router_versions.c.created_at.desc()).limit(limit)
        if wanted is not None:
            statement = statement.where(wanted)
        async with self.store.transaction() as connection:
            return [RouterVersion(**row) for row in (await connection.execute(statement)).mappings()]

    # ---- rollouts

    async def get_rollout(self, rollout_id: str) -> RolloutRow | None:
        async with self.store.transaction() as connection:
            found = await connection.execute(select(rollouts).where(rollouts.c.rollout_id == rollout_id))
            row = found.mappings().first()
            return _rollout(row) if row is not None else None

    async def list_rollouts(self, limit: int = 50) -> list[RolloutRow]:
        """Newest first."""
        async with self.store.transaction() as connection:
            found = await connection.execute(select(rollouts).order_by(rollouts.c.started_at.desc()).limit(limit))
            return [_rollout(row) for row in found.mappings()]

    async def save_rollout(self, rollout_id: str, state: Mapping[str, Any], now: datetime, lease: Lease) -> None:
        """Keep where a rollout stands within its stage, of which no server is told; nothing once the lease is lost."""
        async with self.store.transaction() as connection:
            if await _holds(connection, lease):
                wanted = update(rollouts).where(rollouts.c.rollout_id == rollout_id)
                await connection.execute(wanted.values(state=dict(state), updated_at=now))

    async def add_shadow_decisions(self, decisions: Sequence[ShadowDecision]) -> None:
        """Keep what a router in shadow would have done; a request counts once."""
        make = sqlite_insert if self.store.dialect == "sqlite" else postgres_insert
        rows = [asdict(each) | {"sufficiency": [list(tier) for tier in each.sufficiency]} for each in decisions]
        async with self.store.transaction() as connection:
            await connection.execute(make(shadow_decisions).on_conflict_do_nothing(), rows)

    async def forget_shadow_decisions(self, before: datetime) -> int:
        """Delete what is older. Returns how many."""
        async with self.store.transaction() as connection:
            old = delete(shadow_decisions).where(shadow_decisions.c.created_at < before)
            return int((await connection.execute(old)).rowcount)

    async def count_shadow_decisions(self, version: str, since: datetime) -> tuple[int, int, int]:
        """(all, to the same tier, to a lower tier) of a router in shadow."""
        shadow = shadow_decisions.c
        wanted = select(
            func.count(),
            func.count().filter(shadow.tier == shadow.shadow_tier),
            func.count().filter(shadow.shadow_tier < shadow.tier),
        ).where(shadow.router_version == version, shadow.created_at >= since)
        async with self.store.transaction() as connection:
            num, same, lower = (await connection.execute(wanted)).one()
            return int(num), int(same), int(lower)

    # ---- alerts

    async def raise_alert(self, alert: Alert) -> bool:
        """Keep an alert unless one of its kind and subject is open. True when it is new."""
        is_open = (alerts.c.kind == alert.kind) & (alerts.c.subject == alert.subject) & alerts.c.resolved_at.is_(None)
        async with self.store.transaction() as connection:
            if (await connection.execute(select(alerts.c.alert_id).where(is_open).limit(1))).first() is not None:
                return False
            await connection.execute(insert(alerts).values(**asdict(alert)))
            return True

    async def resolve_alerts(self, kind: str, subject: str, now: datetime) -> int:
        """Close what is open of a kind and subject. Returns how many."""
        is_open = (alerts.c.kind == kind) & (alerts.c.subject == subject) & alerts.c.resolved_at.is_(None)
        async with self.store.transaction() as connection:
            return int((await connection.execute(update(alerts).where(is_open).values(resolved_at=now))).rowcount)

    async def list_alerts(self, *, only_open: bool = False, limit: int = 100) -> list[Alert]:
        """Newest first."""
        statement = select(alerts).order_by(alerts.c.created_at.desc(), alerts.c.alert_id.desc()).limit(limit)
        if only_open:
            statement = statement.where(alerts.c.resolved_at.is_(None))
        async with self.store.transaction() as connection:
            return [Alert(**row) for row in (await connection.execute(statement)).mappings()]


async def _holds(connection: AsyncConnection, lease: Lease) -> bool:
    held = leases.c
    is_same = (held.name == lease.name) & (held.token == lease.token) & (held.holder == lease.holder)
    # SQLite has one writer at a time, and refuses to write on what it read before another one's commit.
    wanted = select(held.name).where(is_same).with_for_update(read=True)
    return (await connection.execute(wanted)).first() is not None


def _by_name(rows: Sequence[Any]) -> Rows:
    return {row["name"]: (row["value"], int(row["version"])) for row in rows}


def _rollout(row: Any) -> RolloutRow:
    return RolloutRow(**{**row, "history": tuple(row["history"])})
