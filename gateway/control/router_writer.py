"""Changes to the routers: stored, rolled out, promoted, rolled back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import insert, select, update

from gateway.control import control_state as names
from gateway.control.audited_change import Audit, AuditedChange, ChangeMaker
from gateway.control.control_state import Canary, router_key, router_of
from gateway.control.errors import Conflict, UnknownVersion
from gateway.ids import uuid7
from gateway.store.control_records import Lease, RouterVersion
from gateway.store.tables import rollouts, router_versions

_MAX_PREVIOUS = 20


class RouterWriter:
    """Changes which router serves, and which one is being rolled out."""

    def __init__(self, changes: ChangeMaker) -> None:
        self._changes = changes

    async def add(self, router: RouterVersion, artifact: bytes, *, by: str, audit: Audit | None = None) -> None:
        """Keep a router; adding the same content again changes nothing."""
        async with self._changes.change(by, audit=audit) as change:
            await insert_router(change, router, artifact)

    async def promote(
        self,
        version: str,
        *,
        by: str,
        reason: str = "",
        expected_version: int | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Let a router serve everything at once; a rollout under way ends.

        Raises
        ------
        UnknownVersion, Conflict
        """
        async with self._changes.change(by, row=names.ROUTER, expected_version=expected_version, audit=audit) as change:
            await _need_router(change, version)
            canary = change.before.router.canary
            if canary is not None:
                status = "complete" if canary.version == version else "superseded"
                await _end_rollout(change, canary, status, reason or f"{version} was promoted by {by}")
            await _serve(change, version)

    async def start_rollout(
        self,
        version: str,
        *,
        by: str,
        reason: str = "",
        supersedes: str | None = None,
        expected_version: int | None = None,
        audit: Audit | None = None,
    ) -> str:
        """Put a stored router in shadow; the leader takes it from there. Returns the rollout's id.

        Parameters
        ----------
        supersedes : the router whose rollout ends for this one, if it is under way; any other one stands in the way

        Raises
        ------
        UnknownVersion
        Conflict
            Another rollout is under way, or the router serves already.
        """
        rollout_id = uuid7()
        async with self._changes.change(by, row=names.ROUTER, expected_version=expected_version, audit=audit) as change:
            await _need_router(change, version)
            router = change.before.router
            if router.canary is not None and router.canary.version != supersedes:
                raise Conflict("The rollout", "none under way", f"{router.canary.version} in {router.canary.stage}")
            if router.active == version:
                raise Conflict("The serving router", "another one", version)
            if router.canary is not None:
                await _end_rollout(change, router.canary, "superseded", f"{version} is better: {reason}")
            canary = Canary(version, 0.0, "shadow", rollout_id)
            now = change.transaction.now
            history = [{"at": now.isoformat(), "stage": "shadow", "share": 0.0, "by": by, "reason": reason}]
            await change.execute(
                insert(rollouts).values(
                    rollout_id=rollout_id,
                    router_version=version,
                    baseline_version=router_key(router.active),
                    status="running",
                    stage="shadow",
                    share=0.0,
                    state={},
                    started_at=now,
                    updated_at=now,
                    reason=reason,
                    history=history,
                )
            )
            await set_status(change, version, "shadow")
            await change.put(names.ROUTER, replace(router, canary=canary).as_dict())
        return rollout_id

    async def move_rollout(
        self,
        canary: Canary,
        state: Mapping[str, Any],
        reason: str,
        *,
        by: str,
        lease: Lease | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Bring a rollout to another stage; ``complete`` and ``rolled_back`` end it.

        Raises
        ------
        Conflict
            This rollout is not under way any more.
        """
        async with self._changes.change(by, lease=lease, audit=audit) as change:
            running = change.before.router.canary
            if running is None or running.rollout_id != canary.rollout_id:
                raise Conflict("The rollout", canary.rollout_id, running.rollout_id if running else "none")
            await change.execute(
                update(rollouts).where(rollouts.c.rollout_id == canary.rollout_id).values(state=dict(state))
            )
            if canary.stage in ("complete", "rolled_back"):
                await _end_rollout(change, canary, canary.stage, reason)
                router = replace(change.before.router, canary=None)
                if canary.stage == "complete":
                    await _serve(change, canary.version)
                else:
                    await change.put(names.ROUTER, router.as_dict())
                return
            await _note_rollout(change, canary, "running", reason)
            await set_status(change, canary.version, "canary")
            await change.put(names.ROUTER, replace(change.before.router, canary=canary).as_dict())

    async def roll_back(
        self, *, by: str, reason: str = "", expected_version: int | None = None, audit: Audit | None = None
    ) -> str | None:
        """Undo the newest router: end the rollout under way, else serve by the router before. Returns what serves.

        Raises
        ------
        Conflict
            There is no router to go back to.
        """
        async with self._changes.change(by, row=names.ROUTER, expected_version=expected_version, audit=audit) as change:
            router = change.before.router
            if router.canary is not None:
                await _end_rollout(change, router.canary, "rolled_back", reason or f"rolled back by {by}")
                await change.put(names.ROUTER, replace(router, canary=None).as_dict())
                return router.active
            if not router.previous:
                raise Conflict("The serving router", "one that came after another", router.active)
            version, *rest = router.previous
            if router.active is not None:
                await set_status(change, router.active, "rolled_back")
            await set_status(change, version, "serving")
            active = router_of(version)
            await change.put(names.ROUTER, replace(router, active=active, previous=tuple(rest)).as_dict())
            return active


async def insert_router(change: AuditedChange, router: RouterVersion, artifact: bytes) -> None:
    """Keep a router within a change; the same content again changes nothing."""
    values = asdict(router) | {"artifact": artifact}
    await change.execute(change.transaction.insert(router_versions).values(**values).on_conflict_do_nothing())


async def _need_router(change: AuditedChange, version: str) -> None:
    wanted = select(router_versions.c.version).where(router_versions.c.version == version)
    if not await change.is_there(wanted):
        raise UnknownVersion("router", version)


async def _serve(change: AuditedChange, version: str) -> None:
    router = change.before.router
    if router.active is not None and router.active != version:
        await set_status(change, router.active, "retired")
    await set_status(change, version, "serving")
    previous = with_previous(router.previous, router.active, version)
    await change.put(names.ROUTER, replace(router, active=version, canary=None, previous=previous).as_dict())


async def set_status(change: AuditedChange, version: str, status: str) -> None:
    """Note within a change what a router is now."""
    await change.execute(update(router_versions).where(router_versions.c.version == version).values(status=status))


async def _end_rollout(change: AuditedChange, canary: Canary, status: str, reason: str) -> None:
    await _note_rollout(change, replace(canary, stage=status), status, reason)
    now = change.transaction.now
    await change.execute(update(rollouts).where(rollouts.c.rollout_id == canary.rollout_id).values(ended_at=now))
    if status != "complete":
        await set_status(change, canary.version, "rolled_back" if status == "rolled_back" else "candidate")


async def _note_rollout(change: AuditedChange, canary: Canary, status: str, reason: str) -> None:
    now = change.transaction.now
    mine = rollouts.c.rollout_id == canary.rollout_id
    found = await change.transaction.connection.execute(select(rollouts.c.history).where(mine))
    history = list(found.scalar() or [])
    history.append(
        {"at": now.isoformat(), "stage": canary.stage, "share": canary.share, "by": change.by, "reason": reason}
    )
    values = {"status": status, "stage": canary.stage, "share": canary.share, "reason": reason}
    await change.execute(update(rollouts).where(mine).values(updated_at=now, history=history, **values))


def with_previous(previous: tuple[str, ...], old: str | None, new: str | None) -> tuple[str, ...]:
    """Versions to go back to, newest first; ``none`` stands for serving without a router."""
    if old == new:
        return previous
    left = router_key(old)
    return (left, *[each for each in previous if each not in (left, router_key(new))])[:_MAX_PREVIOUS]
