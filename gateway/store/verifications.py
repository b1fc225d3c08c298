"""The queue of checks over its tables: claimed by one worker at a time, finished once, nothing lost with a worker.

A claim is a lease with a token of its own. Whatever ends a job names the token, so a worker that was slow, or thought
dead, changes nothing once somebody else has the job. Times are the caller's; workers on several machines need clocks
that agree to well within a lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import and_, delete, func, or_, select, update

from gateway.ids import uuid7
from gateway.store.leases import longest_lease_s
from gateway.store.records import VerificationJob
from gateway.store.rows import clean_text, from_nano_usd, to_nano_usd
from gateway.store.store import Store
from gateway.store.tables import requests, verification_texts, verifications

_OPEN = ("queued", "running")
_MAX_ERROR_CHARS = 500
_V = verifications.c


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that is this worker's for now. ``token`` proves it; ``num_attempts`` counts this one."""

    job: VerificationJob
    token: str
    num_attempts: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Holds what work cost: dollars, and device seconds as far as they are measured."""

    cost_usd: Decimal = Decimal(0)
    compute_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.cost_usd + other.cost_usd, self.compute_s + other.compute_s)


NOTHING = Spent()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Holds what a check found: the graders' own ``scores`` by name; ``other_answer`` was generated for it."""

    p_good: float
    grader: str
    grader_version: str
    scores: Mapping[str, float] = field(default_factory=dict)
    spent: Spent = NOTHING
    other_answer: str | None = None

    @property
    def verdict(self) -> int:
        """1 where the cheap answer was more likely good enough than not."""
        return int(self.p_good >= 0.5)


@dataclass(frozen=True, slots=True)
class QueueState:
    """Counts jobs that wait and run, and when the oldest of them was drawn (None without any)."""

    num_queued: int = 0
    num_running: int = 0
    oldest_at: datetime | None = None


class VerificationQueue:
    """Jobs of one database."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(self, worker: str, now: datetime, *, lease_s: float, max_attempts: int) -> Claim | None:
        """Take the oldest job that may be tried now; None when there is none.

        Jobs whose lease has run out are taken too: their worker is gone; so are those whose lease ends later than any
        clock that is right could have said. One statement decides: with row locks that
        others skip on PostgreSQL, under the one write lock on SQLite.
        """
        longest = now + timedelta(seconds=longest_lease_s(lease_s))
        is_due = or_(_V.retry_at.is_(None), _V.retry_at <= now)
        is_free = or_(
            and_(_V.status == "queued", is_due),
            and_(_V.status == "running", or_(_V.claimed_until < now, _V.claimed_until > longest)),
        )
        oldest = select(_V.verification_id).where(is_free, _V.num_attempts < max_attempts).order_by(_V.created_at)
        oldest = oldest.limit(1)
        if self._store.dialect == "postgresql":
            oldest = oldest.with_for_update(skip_locked=True)
        token = f"{worker}/{uuid7()}"
        taking = (
            update(verifications)
            .where(_V.verification_id == oldest.scalar_subquery())
            .values(
                status="running",
                claimed_by=token,
                claimed_until=now + timedelta(seconds=lease_s),
                num_attempts=_V.num_attempts + 1,
            )
            .returning(*_V)
        )
        async with self._store.transaction() as connection:
            taken = (await connection.execute(taking)).mappings().one_or_none()
            if taken is None:
                return None
            wanted = select(verification_texts).where(verification_texts.c.verification_id == taken["verification_id"])
            texts = (await connection.execute(wanted)).mappings().one_or_none()
        return Claim(_job(dict(taken), dict(texts or {})), token, taken["num_attempts"])

    async def renew(self, claim: Claim, now: datetime, *, lease_s: float) -> bool:
        """Hold a job longer; False when it is no longer ours."""
        return await self._change(claim, {"claimed_until": now + timedelta(seconds=lease_s)})

    async def complete(self, claim: Claim, result: CheckResult, now: datetime, *, keep_texts: bool) -> bool:
        """Store the result, once: False, and nothing changed, when the job is no longer ours."""
        values = {
            "status": "done",
            "finished_at": now,
            "p_good": result.p_good,
            "verdict": result.verdict,
            "grader": result.grader,
            "grader_version": result.grader_version,
            "scores": dict(result.scores),
            "error": None,
            "retry_at": None,
        }
        return await self._change(
            claim, values | _cost(result.spent), drop_texts=not keep_texts, other_answer=result.other_answer
        )

    async def release(self, claim: Claim, spent: Spent, *, at: datetime | None = None) -> bool:
        """Give a job back as if it had not been tried (to let live requests pass); what was spent stays counted.

        With ``at`` it is not taken again before then.
        """
        values = {"status": "queued", "num_attempts": _V.num_attempts - 1, "retry_at": at}
        return await self._change(claim, _UNCLAIMED | values | _cost(spent))

    async def retry(self, claim: Claim, error: str, spent: Spent, at: datetime) -> bool:
        """Give a job back to be tried again, not before ``at``."""
        values = {"status": "queued", "retry_at": at, "error": _cut(error)}
        return await self._change(claim, _UNCLAIMED | values | _cost(spent))

    async def fail(self, claim: Claim, error: str, spent: Spent, now: datetime) -> bool:
        """Give a job up."""
        values = {"status": "failed", "finished_at": now, "error": _cut(error)}
        return await self._change(claim, values | _cost(spent), drop_texts=True)

    async def sweep(self, now: datetime, *, max_age_s: float, max_attempts: int) -> tuple[int, int]:
        """Give up what is too old, and what killed every worker that tried it. Returns (expired, failed)."""
        is_idle = or_(_V.status == "queued", and_(_V.status == "running", _V.claimed_until < now))
        too_old = and_(is_idle, _V.created_at < now - timedelta(seconds=max_age_s))
        hopeless = and_(is_idle, _V.num_attempts >= max_attempts)
        expired = await self._give_up(too_old, "expired", "was not checked in time", now)
        return expired, await self._give_up(hopeless, "failed", "every worker that tried it ended", now)

    async def _give_up(self, which: Any, status: str, error: str, now: datetime) -> int:
        async with self._store.transaction() as connection:
            found = await connection.execute(
                update(verifications)
                .where(which)
                .values(status=status, finished_at=now, error=func.coalesce(_V.error, error), **_UNCLAIMED)
                .returning(_V.verification_id)
            )
            ids = list(found.scalars())
            if ids:
                await connection.execute(
                    delete(verification_texts).where(verification_texts.c.verification_id.in_(ids))
                )
        return len(ids)

    async def state(self) -> QueueState:
        counted = select(_V.status, func.count(), func.min(_V.created_at)).where(_V.status.in_(_OPEN))
        async with self._store.transaction() as connection:
            rows = {row[0]: row for row in await connection.execute(counted.group_by(_V.status))}
        num_queued, num_running = (int(rows[name][1]) if name in rows else 0 for name in _OPEN)
        return QueueState(num_queued, num_running, min((row[2] for row in rows.values()), default=None))

    async def spent_since(self, moment: datetime) -> Spent:
        """Return what checks that ended after ``moment``, and those under way, have cost."""
        which = or_(_V.finished_at > moment, _V.status.in_(_OPEN))
        summed = select(func.sum(_V.cost_nano_usd), func.sum(_V.compute_s)).where(which)
        async with self._store.transaction() as connection:
            nano, compute_s = (await connection.execute(summed)).one()
        return Spent(from_nano_usd(int(nano or 0)), float(compute_s or 0.0))

    async def served_since(self, moment: datetime) -> Decimal:
        """Return what answering cost since ``moment``: by device seconds where measured, else by the price table."""
        cost = func.coalesce(requests.c.measured_cost_nano_usd, requests.c.cost_nano_usd)
        async with self._store.transaction() as connection:
            nano = (await connection.execute(select(func.sum(cost)).where(requests.c.created_at >= moment))).scalar()
        return from_nano_usd(int(nano or 0))

    async def _change(
        self, claim: Claim, values: Mapping[str, Any], *, drop_texts: bool = False, other_answer: str | None = None
    ) -> bool:
        """Change a job that is still this claim's, and its texts, in one transaction."""
        identity = claim.job.verification_id
        still_ours = and_(_V.verification_id == identity, _V.status == "running", _V.claimed_by == claim.token)
        texts = verification_texts.c.verification_id == identity
        async with self._store.transaction() as connection:
            changed = await connection.execute(update(verifications).where(still_ours).values(**values))
            if changed.rowcount != 1:
                return False
            if drop_texts:
                await connection.execute(delete(verification_texts).where(texts))
            elif other_answer is not None:
                kept = update(verification_texts).where(texts).values(other_answer=clean_text(other_answer))
                await connection.execute(kept)
        return True


_UNCLAIMED: dict[str, Any] = {"claimed_by": None, "claimed_until": None}


def _cost(spent: Spent) -> dict[str, Any]:
    return {
        "cost_nano_usd": _V.cost_nano_usd + to_nano_usd(spent.cost_usd),
        "compute_s": func.coalesce(_V.compute_s, 0.0) + spent.compute_s,
    }


def _cut(error: str) -> str:
    return clean_text(error)[:_MAX_ERROR_CHARS]


def _job(row: Mapping[str, Any], texts: Mapping[str, Any]) -> VerificationJob:
    names = VerificationJob.__slots__
    known = {name: row[name] for name in names if name in row}
    known["regions"] = None if row["regions"] is None else tuple(row["regions"])
    return VerificationJob(
        **known, prompt=texts.get("prompt", ""), sampling=texts.get("sampling", {}), answer=texts.get("answer", "")
    )
