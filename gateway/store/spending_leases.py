"""Spending leases in the database: what the calls under way in each process may cost at most.

A process renews its row while it lives and deletes it when it stops. A row past its time was left by one that was
killed; it is deleted by the same transaction that raises the alert, so it is reported once, whoever looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import delete, func, insert, literal, or_
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from gateway.ids import uuid7
from gateway.store.leases import longest_lease_s
from gateway.store.store import Store
from gateway.store.tables import UtcDateTime, alerts, spending_leases
from policies.pricing import from_nano_usd

ProcessKind = Literal["server", "verify-worker"]

ALERT_KIND = "spending"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingLeaseRow:
    """``amount_nano_usd`` bounds what the calls under way in ``holder`` may cost."""

    lease_id: str
    process: ProcessKind
    holder: str
    opened_at: datetime
    amount_nano_usd: int


class SpendingLeaseStore:
    """Keeps, ends and reports leases. Methods raise :class:`StoreUnavailable` and its kinds."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, row: SpendingLeaseRow, ttl_s: float) -> None:
        """Keep a lease for so long; it takes the place of the same lease's earlier row, if that is still there."""
        make = sqlite_insert(spending_leases) if self._store.dialect == "sqlite" else postgres_insert(spending_leases)
        changed = {"amount_nano_usd": row.amount_nano_usd, "expires_at": self._after(ttl_s)}
        values = {name: getattr(row, name) for name in row.__slots__} | changed
        statement = make.values(values).on_conflict_do_update(index_elements=["lease_id"], set_=changed)
        async with self._store.transaction() as connection:
            await connection.execute(statement)

    async def end(self, lease_id: str) -> None:
        """Forget a lease: nothing is under way."""
        async with self._store.transaction() as connection:
            await connection.execute(delete(spending_leases).where(spending_leases.c.lease_id == lease_id))

    async def report(self, ttl_s: float, *, is_only_server: bool) -> Sequence[SpendingLeaseRow]:
        """Take the leases of dead processes away and raise an alert for each; returns them.

        Parameters
        ----------
        ttl_s : how long leases last; one that ends later than a right clock could have said counts as over
        is_only_server : no other server can be alive, so every server's lease was left by a dead one
        """
        column = spending_leases.c
        is_over = or_(column.expires_at < self._after(0.0), column.expires_at > self._after(longest_lease_s(ttl_s)))
        if is_only_server:
            is_over = or_(is_over, column.process == "server")
        async with self._store.transaction() as connection:
            taken = (await connection.execute(delete(spending_leases).where(is_over).returning(*column))).mappings()
            found = [dict(each) for each in taken]
            if found:
                await connection.execute(insert(alerts), [_alert(each) for each in found])
        return [SpendingLeaseRow(**{name: each[name] for name in SpendingLeaseRow.__slots__}) for each in found]

    def _after(self, seconds: float) -> Any:
        if self._store.dialect == "sqlite":
            return literal(datetime.now(UTC) + timedelta(seconds=seconds), UtcDateTime)
        return func.clock_timestamp() + literal(timedelta(seconds=seconds))


def _alert(lease: dict[str, Any]) -> dict[str, Any]:
    amount_usd = from_nano_usd(lease["amount_nano_usd"])
    problem = (
        f"The {lease['process']} {lease['holder']} did not end in order: it had up to {amount_usd:f} USD of calls to "
        "remote models under way that the log does not hold."
    )
    body = {
        "problem": problem,
        "process": lease["process"],
        "holder": lease["holder"],
        "amount_usd": f"{amount_usd:f}",
        "opened_at": lease["opened_at"].isoformat(),
    }
    return {
        "alert_id": uuid7(),
        "created_at": datetime.now(UTC),
        "kind": ALERT_KIND,
        "severity": "warning",
        "subject": lease["holder"],
        "body": body,
        "resolved_at": None,
    }
