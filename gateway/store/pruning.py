"""Forgets what is old, in small transactions with pauses, so that a serving gateway writes between them.

Every method says how many it deleted, and may be called again and again: what is gone is gone.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Table, Text, and_, cast, delete, false, or_, select, update

from gateway.store.store import Store
from gateway.store.tables import (
    admin_audit,
    alerts,
    control,
    evaluations,
    feedback,
    request_texts,
    requests,
    responses,
    retrain_runs,
    rollouts,
    router_versions,
    sessions,
    shadow_decisions,
    verification_texts,
    verifications,
)

_AT_ONCE = 500
_PAUSE_S = 0.01
_OPEN_CHECKS = ("queued", "running")
_IN_USE = ("shadow", "canary", "serving")


class LogPruner:
    """Deletes by age.

    Parameters
    ----------
    store : the open database
    pause_s : between two transactions
    """

    def __init__(self, store: Store, pause_s: float = _PAUSE_S) -> None:
        self._store = store
        self._pause_s = pause_s

    async def texts(self, before: datetime, after: datetime | None = None) -> int:
        """Forget the texts of requests, checks and feedback from before, and responses. Their rows stay.

        Returns of how many.

        A check that was still to be made is given up: it has nothing left to read.

        Parameters
        ----------
        after : nothing is looked for that is older, since an earlier call has dealt with it
        """
        joined = request_texts.join(requests, requests.c.request_id == request_texts.c.request_id)
        kept = (
            select(request_texts.c.request_id)
            .select_from(joined)
            .where(_is_between(requests.c.created_at, after, before))
        )
        num = await self._delete(request_texts, request_texts.c.request_id, kept)
        num += await self.responses(before)
        await self._give_up_checks(_is_between(verifications.c.created_at, after, before))
        checks = verification_texts.join(verifications)
        column = verification_texts.c.verification_id
        kept = select(column).select_from(checks).where(_is_between(verifications.c.created_at, after, before))
        num += await self._delete(verification_texts, column, kept)
        await self._forget_errors(_is_between(verifications.c.created_at, after, before))
        return num + await self._forget_reports(_is_between(feedback.c.created_at, after, before))

    async def responses(self, before: datetime) -> int:
        """Forget kept answers of ``/v1/responses``; nobody can go on from them any more."""
        kept = select(responses.c.request_id).where(responses.c.created_at < before)
        return await self._delete(responses, responses.c.request_id, kept)

    async def rows(self, before: datetime) -> int:
        """Forget whole rows, with their texts, checks, feedback, labels and shadow decisions. Returns how many."""
        # They hang on no row, so that they go by their own time.
        await self.shadow_decisions(before)
        kept = select(requests.c.request_id).where(requests.c.created_at < before)
        return await self._delete(requests, requests.c.request_id, kept)

    async def sessions(self, before: datetime) -> int:
        """Forget conversations that rest since then; they start anew."""
        return await self._change(delete(sessions).where(sessions.c.updated_at < before))

    async def shadow_decisions(self, before: datetime) -> int:
        """Forget what routers in shadow would have done."""
        column = shadow_decisions.c
        kept = select(column.request_id).where(column.created_at < before)
        return await self._delete(shadow_decisions, column.request_id, kept, column.created_at < before)

    async def history(self, before: datetime) -> dict[str, int]:
        """Forget what was done and found before: by table, how many.

        Resolved alerts, the audit log, evaluations, retrains and rollouts that ended, and routers that neither serve,
        nor are on their way, nor would serve again after a step back. Policies' versions and configurations stay: rows
        of the log name them, and they are small.
        """
        plain: list[tuple[Table, str, ColumnElement[bool]]] = [
            (admin_audit, "audit_id", admin_audit.c.created_at < before),
            (alerts, "alert_id", alerts.c.resolved_at < before),
            (evaluations, "evaluation_id", evaluations.c.created_at < before),
            (retrain_runs, "run_id", retrain_runs.c.finished_at < before),
            (rollouts, "rollout_id", rollouts.c.ended_at < before),
            (router_versions, "version", await self._idle_routers(before)),
        ]
        found = {}
        for table, name, is_old in plain:
            column = table.c[name]
            found[table.name] = await self._delete(table, column, select(column).where(is_old))
        return found

    # ---- inside

    async def _idle_routers(self, before: datetime) -> ColumnElement[bool]:
        async with self._store.transaction() as connection:
            value = (await connection.execute(select(control.c.value).where(control.c.name == "router"))).scalar()
        if value is None:
            return false()
        canary = value.get("canary") or {}
        used = {value.get("active"), canary.get("version"), *value.get("previous", ())} - {None}
        column = router_versions.c
        return and_(column.created_at < before, column.status.not_in(_IN_USE), column.version.not_in(used))

    async def _give_up_checks(self, is_old: ColumnElement[bool]) -> None:
        which = and_(is_old, verifications.c.status.in_(_OPEN_CHECKS))
        values: dict[str, Any] = {"status": "expired", "claimed_by": None, "claimed_until": None}
        await self._change(update(verifications).where(which).values(finished_at=datetime.now(UTC), **values))

    async def _forget_errors(self, is_old: ColumnElement[bool]) -> None:
        """What a model said when a check failed may repeat the prompt."""
        which = and_(is_old, verifications.c.error.is_not(None))
        await self._update(verifications, "verification_id", which, {"error": None})

    async def _forget_reports(self, is_old: ColumnElement[bool]) -> int:
        column = feedback.c
        has_metadata = cast(column.metadata, Text) != "{}"
        has_text = or_(column.reference.is_not(None), column.comment.is_not(None), has_metadata)
        values: dict[str, Any] = {"reference": None, "comment": None, "metadata": {}}
        return await self._update(feedback, "feedback_id", and_(is_old, has_text), values)

    async def _update(self, table: Table, name: str, which: ColumnElement[bool], values: dict[str, Any]) -> int:
        num_changed = 0
        column = table.c[name]
        chosen = select(column).where(which).limit(_AT_ONCE)
        while num := await self._change(update(table).where(column.in_(chosen)).values(**values)):
            num_changed += num
            await asyncio.sleep(self._pause_s)
        return num_changed

    async def _delete(self, table: Table, column: ColumnElement[str], chosen: Any, *also: ColumnElement[bool]) -> int:
        num_deleted = 0
        while num := await self._change(delete(table).where(column.in_(chosen.limit(_AT_ONCE)), *also)):
            num_deleted += num
            await asyncio.sleep(self._pause_s)
        return num_deleted

    async def _change(self, statement: Any) -> int:
        async with self._store.transaction() as connection:
            return int((await connection.execute(statement)).rowcount)


def _is_between(column: Any, after: datetime | None, before: datetime) -> ColumnElement[bool]:
    is_old: ColumnElement[bool] = column < before
    return is_old if after is None else and_(is_old, column >= after)
