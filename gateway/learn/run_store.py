"""Retrain runs in the database: asked for, running, ended; and those whose process is no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select, update

from gateway.ids import uuid7
from gateway.learn.errors import RetrainRefused
from gateway.store.leases import longest_lease_s
from gateway.store.store import Store
from gateway.store.tables import leases, retrain_runs, router_versions

LEASE = "retrain"
"""Held by the process that retrains; a run whose holder does not hold it any more was abandoned."""

ENDED = ("kept", "promoted", "failed", "abandoned")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainRun:
    """One run; ``status`` is requested, running, kept, promoted, failed or abandoned."""

    run_id: str
    created_at: datetime
    trigger: str
    reason: str
    status: str
    stage: str
    progress: float
    holder: str
    router_version: str | None = None
    evaluation_id: str | None = None
    error: str | None = None
    finished_at: datetime | None = None


class RunStore:
    """Reads and writes runs. Methods raise :class:`StoreUnavailable` and its kinds."""

    def __init__(self, store: Store, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._store = store
        self._now = now

    async def begin(self, run_id: str | None, trigger: str, reason: str, holder: str) -> str:
        """Take a requested run, or make one. Called while holding the lease. Returns its id.

        Raises
        ------
        RetrainRefused
            The run named is not waiting to be taken.
        """
        running = {"status": "running", "holder": holder, "stage": "start", "progress": 0.0}
        async with self._store.transaction() as connection:
            if run_id is not None:
                wanted = (retrain_runs.c.run_id == run_id) & (retrain_runs.c.status == "requested")
                if (await connection.execute(update(retrain_runs).where(wanted).values(**running))).rowcount == 0:
                    raise RetrainRefused(f"Run {run_id} is not waiting to be taken: it was taken before, or never was.")
                return run_id
            made = {"run_id": uuid7(), "created_at": self._now(), "trigger": trigger, "reason": reason}
            await connection.execute(insert(retrain_runs).values(**made, **running))
            return str(made["run_id"])

    async def note(self, run_id: str, stage: str, progress: float) -> None:
        """Say how far a run is."""
        await self._change(run_id, {"stage": stage, "progress": progress})

    async def end(self, run_id: str, status: str, **values: Any) -> None:
        """The run's ending, once: what has ended stays as it is."""
        assert status in ENDED
        await self._change(run_id, {"status": status, "finished_at": self._now(), **values})

    async def get(self, run_id: str) -> RetrainRun | None:
        found = await self._select(select(retrain_runs).where(retrain_runs.c.run_id == run_id))
        return found[0] if found else None

    async def next_requested(self) -> RetrainRun | None:
        """Return the oldest run that waits to be taken."""
        waiting = select(retrain_runs).where(retrain_runs.c.status == "requested")
        found = await self._select(waiting.order_by(retrain_runs.c.run_id).limit(1))
        return found[0] if found else None

    async def is_any_open(self) -> bool:
        """Return whether a run waits or is under way."""
        wanted = select(retrain_runs).where(retrain_runs.c.status.in_(("requested", "running")))
        return bool(await self._select(wanted.limit(1)))

    async def newest_end(self) -> datetime | None:
        """Return when the last run began that ended by itself; failed ones count, lest a fault is retried for ever."""
        wanted = select(retrain_runs).where(retrain_runs.c.status.in_(ENDED))
        found = await self._select(wanted.order_by(retrain_runs.c.created_at.desc()).limit(1))
        return found[0].created_at if found else None

    async def installed_at(self) -> datetime | None:
        """Return when the first router came into this database: the first weekly run is counted from it."""
        async with self._store.transaction() as connection:
            found: datetime | None = (await connection.execute(select(func.min(router_versions.c.created_at)))).scalar()
            return found

    async def mark_abandoned(self, now: datetime, lease_s: float = 0.0) -> list[str]:
        """End running runs whose holder does not hold the lease of ``lease_s`` any more. Returns their ids."""
        longest = now + timedelta(seconds=longest_lease_s(lease_s))
        held = select(leases.c.holder).where(leases.c.name == LEASE, leases.c.expires_at.between(now, longest))
        lost = (retrain_runs.c.status == "running") & retrain_runs.c.holder.not_in(held)
        ended = {"status": "abandoned", "finished_at": now, "error": "the process that retrained ended before the run"}
        async with self._store.transaction() as connection:
            statement = update(retrain_runs).where(lost).values(**ended).returning(retrain_runs.c.run_id)
            return [str(row.run_id) for row in await connection.execute(statement)]

    async def _change(self, run_id: str, values: dict[str, Any]) -> None:
        mine = (retrain_runs.c.run_id == run_id) & (retrain_runs.c.status == "running")
        async with self._store.transaction() as connection:
            await connection.execute(update(retrain_runs).where(mine).values(**values))

    async def _select(self, statement: Any) -> list[RetrainRun]:
        async with self._store.transaction() as connection:
            return [RetrainRun(**row) for row in (await connection.execute(statement)).mappings()]
