"""Every change to what is in force: one transaction with its audit entry, then word to the other servers.

Changes are serialised by the database, so a mutation sees what it changes. ``expected_version`` (the version of the row
that was read) or ``if_active`` (the policy version that was read) turn a change into a compare-and-set; a change that
comes too late raises :class:`Conflict` and changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select, update

from gateway.control import state as names
from gateway.control.errors import Conflict, LeaseLost, UnknownVersion
from gateway.control.state import ActivePolicies, Canary, ControlState, KillSwitch, Tightened, tightening_as_dict
from gateway.ids import uuid7
from gateway.store.control import ControlStore, ControlTransaction
from gateway.store.control_records import AuditEntry, Lease, RouterVersion
from gateway.store.records import PolicyVersion
from gateway.store.tables import leases, policy_versions, retrain_runs, rollouts, router_versions

Publish = Callable[[int], Awaitable[None]]
"""Tells the other servers the number of a change; must not raise."""

_MAX_PREVIOUS = 20


async def _tell_nobody(generation: int) -> None:
    """One server alone finds its own changes by looking."""


class Change:
    """One change under way: the state it began from, and what it writes."""

    def __init__(self, transaction: ControlTransaction, rows: Any, by: str) -> None:
        self.transaction = transaction
        self.before = ControlState.decode(rows)
        self.by = by

    async def put(self, name: str, value: Mapping[str, Any]) -> None:
        await self.transaction.put(name, value, self.by)

    async def execute(self, statement: Any) -> int:
        """Rows that a statement touched."""
        return int((await self.transaction.connection.execute(statement)).rowcount)

    async def is_there(self, statement: Any) -> bool:
        return (await self.transaction.connection.execute(statement)).first() is not None


class ControlWriter:
    """The one way to change what is in force.

    Parameters
    ----------
    store : the control tables
    publish : called after each commit
    clock : wall clock, aware
    """

    def __init__(
        self,
        store: ControlStore,
        publish: Publish = _tell_nobody,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.store = store
        self.publish = publish
        self._clock = clock

    @asynccontextmanager
    async def change(
        self,
        by: str,
        *,
        row: str | None = None,
        expected_version: int | None = None,
        audit: AuditEntry | None = None,
        lease: Lease | None = None,
    ) -> AsyncIterator[Change]:
        """A change made by hand: what is done through it, the audit entry and the new generation are one.

        Parameters
        ----------
        by : who, for the row
        row, expected_version : refuse unless this row has this version
        audit : written in the same transaction
        lease : refuse unless it is still held (the fencing token)

        Raises
        ------
        Conflict, LeaseLost, StoreUnavailable and its kinds
        """
        async with self.store.change(self._clock()) as transaction:
            rows = await transaction.rows()
            if row is not None and expected_version is not None:
                found = rows[row][1] if row in rows else 0
                if found != expected_version:
                    raise Conflict(row, expected_version, found)
            if lease is not None:
                await _check_lease(transaction, lease)
            yield Change(transaction, rows, by)
            if audit is not None:
                await transaction.audit(audit)
        await self.publish(transaction.generation)

    # ---- kill switch

    async def set_kill_switch(
        self,
        on: bool,
        reason: str,
        *,
        by: str,
        expected_version: int | None = None,
        audit: AuditEntry | None = None,
    ) -> None:
        """Send all traffic to the top tier, or route again."""
        async with self.change(by, row=names.KILL_SWITCH, expected_version=expected_version, audit=audit) as change:
            await change.put(names.KILL_SWITCH, KillSwitch(on, reason).as_dict())

    # ---- policies

    async def put_policy(
        self,
        policy: PolicyVersion,
        *,
        by: str,
        activate: bool = True,
        if_active: str | None = None,
        audit: AuditEntry | None = None,
    ) -> None:
        """Keep a version of a policy, which may be there already, and put it in force.

        Parameters
        ----------
        if_active : the version that must be in force now, empty for none
        """
        async with self.change(by, audit=audit) as change:
            _check_active(change.before, policy.name, if_active)
            await self._insert_policy(change, policy)
            if activate:
                await self._activate(change, policy.name, policy.version)

    async def activate_policy(
        self, name: str, version: str, *, by: str, if_active: str | None = None, audit: AuditEntry | None = None
    ) -> None:
        """Put a stored version in force, such as an earlier one.

        Raises
        ------
        UnknownVersion
        """
        async with self.change(by, audit=audit) as change:
            _check_active(change.before, name, if_active)
            stored = policy_versions.c
            if not await change.is_there(select(stored.name).where(stored.name == name, stored.version == version)):
                raise UnknownVersion("policy version", f"{name}@{version}")
            await self._activate(change, name, version)

    async def remove_policy(
        self, name: str, *, by: str, if_active: str | None = None, audit: AuditEntry | None = None
    ) -> None:
        """Serve a policy no more; its versions stay. The default policy cannot be removed.

        Raises
        ------
        UnknownVersion, Conflict
        """
        async with self.change(by, audit=audit) as change:
            policies = change.before.policies
            if name not in policies.active:
                raise UnknownVersion("policy", name)
            _check_active(change.before, name, if_active)
            if name == policies.default:
                raise Conflict(f"The default policy {name!r}", "another default", "this one")
            active = {each: version for each, version in policies.active.items() if each != name}
            await change.put(names.POLICIES, replace(policies, active=active).as_dict())

    async def set_default_policy(self, name: str, *, by: str, audit: AuditEntry | None = None) -> None:
        """Choose the policy of requests that name none.

        Raises
        ------
        UnknownVersion
        """
        async with self.change(by, audit=audit) as change:
            if name not in change.before.policies.active:
                raise UnknownVersion("policy", name)
            await change.put(names.POLICIES, replace(change.before.policies, default=name).as_dict())

    async def apply_configuration(
        self, policies: Mapping[str, tuple[PolicyVersion, str]], router: tuple[str, RouterVersion | None, bytes]
    ) -> None:
        """Bring what the configuration says into force, unless it said so before and was overruled since.

        Parameters
        ----------
        policies : name -> (version, mark of what the configuration wrote)
        router : (version or ``none``, its entry, its bytes; no entry for a router that is not stored)
        """
        by = "config"
        async with self.change(by) as change:
            before = change.before
            found = dict(before.policies.active)
            for name, (policy, mark) in policies.items():
                await self._insert_policy(change, policy)
                if before.policies.config.get(name) != mark or name not in found:
                    found[name] = policy.version
            marks = {name: mark for name, (_, mark) in policies.items()}
            await change.put(names.POLICIES, ActivePolicies(found, before.policies.default, marks).as_dict())
            version, entry, artifact = router
            if entry is not None:
                await self._insert_router(change, entry, artifact)
            if before.router.config != version:
                active = None if version == "none" else version
                is_first = not before.router.config
                previous = () if is_first else _with_previous(before.router.previous, before.router.active, active)
                await change.put(
                    names.ROUTER,
                    replace(before.router, active=active, config=version, previous=previous).as_dict(),
                )

    # ---- routers

    async def add_router(
        self, router: RouterVersion, artifact: bytes, *, by: str, audit: AuditEntry | None = None
    ) -> None:
        """Keep a router; adding the same content again changes nothing."""
        async with self.change(by, audit=audit) as change:
            await self._insert_router(change, router, artifact)

    async def set_router_status(
        self, version: str, status: str, note: str = "", *, by: str, audit: AuditEntry | None = None
    ) -> None:
        """Note what became of a router that does not serve, such as ``rejected``.

        Raises
        ------
        UnknownVersion
        """
        async with self.change(by, audit=audit) as change:
            await self._need_router(change, version)
            values = {"status": status} | ({"note": note} if note else {})
            await change.execute(update(router_versions).where(router_versions.c.version == version).values(**values))

    async def promote_router(
        self,
        version: str,
        *,
        by: str,
        reason: str = "",
        expected_version: int | None = None,
        audit: AuditEntry | None = None,
    ) -> None:
        """Let a router serve everything at once; a rollout under way ends.

        Raises
        ------
        UnknownVersion, Conflict
        """
        async with self.change(by, row=names.ROUTER, expected_version=expected_version, audit=audit) as change:
            await self._need_router(change, version)
            canary = change.before.router.canary
            if canary is not None:
                status = "complete" if canary.version == version else "superseded"
                await self._end_rollout(change, canary, status, reason or f"{version} was promoted by {by}")
            await self._serve(change, version)

    async def start_rollout(
        self,
        version: str,
        *,
        by: str,
        reason: str = "",
        expected_version: int | None = None,
        audit: AuditEntry | None = None,
    ) -> str:
        """Put a stored router in shadow; the leader takes it from there. Returns the rollout's id.

        Raises
        ------
        UnknownVersion
        Conflict
            Another rollout is under way, or the router serves already.
        """
        rollout_id = uuid7()
        async with self.change(by, row=names.ROUTER, expected_version=expected_version, audit=audit) as change:
            await self._need_router(change, version)
            router = change.before.router
            if router.canary is not None:
                raise Conflict("The rollout", "none under way", f"{router.canary.version} in {router.canary.stage}")
            if router.active == version:
                raise Conflict("The serving router", "another one", version)
            canary = Canary(version, 0.0, "shadow", rollout_id)
            now = change.transaction.now
            history = [{"at": now.isoformat(), "stage": "shadow", "share": 0.0, "by": by, "reason": reason}]
            await change.execute(
                insert(rollouts).values(
                    rollout_id=rollout_id,
                    router_version=version,
                    baseline_version=router.active or "none",
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
            await self._set_status(change, version, "shadow")
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
        audit: AuditEntry | None = None,
    ) -> None:
        """Bring a rollout to another stage; ``complete`` and ``rolled_back`` end it.

        Raises
        ------
        Conflict
            This rollout is not under way any more.
        """
        async with self.change(by, lease=lease, audit=audit) as change:
            running = change.before.router.canary
            if running is None or running.rollout_id != canary.rollout_id:
                raise Conflict("The rollout", canary.rollout_id, running.rollout_id if running else "none")
            await change.execute(
                update(rollouts).where(rollouts.c.rollout_id == canary.rollout_id).values(state=dict(state))
            )
            if canary.stage in ("complete", "rolled_back"):
                await self._end_rollout(change, canary, canary.stage, reason)
                router = replace(change.before.router, canary=None)
                if canary.stage == "complete":
                    await self._serve(change, canary.version)
                else:
                    await change.put(names.ROUTER, router.as_dict())
                return
            await self._note_rollout(change, canary, "running", reason)
            await self._set_status(change, canary.version, "canary")
            await change.put(names.ROUTER, replace(change.before.router, canary=canary).as_dict())

    async def roll_back(
        self, *, by: str, reason: str = "", expected_version: int | None = None, audit: AuditEntry | None = None
    ) -> str | None:
        """Undo the newest router: end the rollout under way, else serve by the router before. Returns what serves.

        Raises
        ------
        Conflict
            There is no router to go back to.
        """
        async with self.change(by, row=names.ROUTER, expected_version=expected_version, audit=audit) as change:
            router = change.before.router
            if router.canary is not None:
                await self._end_rollout(change, router.canary, "rolled_back", reason or f"rolled back by {by}")
                await change.put(names.ROUTER, replace(router, canary=None).as_dict())
                return router.active
            if not router.previous:
                raise Conflict("The serving router", "one that came after another", router.active)
            version, *rest = router.previous
            if router.active is not None:
                await self._set_status(change, router.active, "rolled_back")
            await self._set_status(change, version, "serving")
            active = None if version == "none" else version
            await change.put(names.ROUTER, replace(router, active=active, previous=tuple(rest)).as_dict())
            return active

    # ---- the monitor's

    async def tighten(
        self, policy: str, tiers: Mapping[int, float], reason: str, *, by: str, lease: Lease | None = None
    ) -> bool:
        """Ask more of some tiers; what was asked before is never lowered. True when anything changed."""
        async with self.change(by, lease=lease) as change:
            asked = {name: dict(each) for name, each in change.before.tightening.items()}
            mine = asked.setdefault(policy, {})
            since = change.transaction.now.isoformat()
            higher = {t: least for t, least in tiers.items() if t not in mine or least > mine[t].least}
            mine.update({tier: Tightened(least, reason, since) for tier, least in higher.items()})
            await change.put(names.TIGHTENING, tightening_as_dict(asked))
        return bool(higher)

    async def release(
        self,
        policy: str,
        tiers: Mapping[int, float | None],
        *,
        by: str,
        reason: str = "",
        audit: AuditEntry | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Ask less again: tier -> the new least P(as good), None to ask no more than the policy."""
        async with self.change(by, audit=audit, lease=lease) as change:
            asked = {name: dict(each) for name, each in change.before.tightening.items()}
            mine = asked.get(policy, {})
            for tier, least in tiers.items():
                if least is None:
                    mine.pop(tier, None)
                elif tier in mine:
                    mine[tier] = Tightened(least, reason or mine[tier].reason, change.transaction.now.isoformat())
            await change.put(names.TIGHTENING, tightening_as_dict(asked))

    async def request_retrain(self, trigger: str, reason: str = "") -> str:
        """Ask for a new router unless one is asked for or being made already. Returns the run's id."""
        async with self.change(trigger) as change:
            open_runs = retrain_runs.c.status.in_(("requested", "running"))
            found = await change.transaction.connection.execute(select(retrain_runs.c.run_id).where(open_runs).limit(1))
            if (run_id := found.scalar()) is not None:
                return str(run_id)
            run_id = uuid7()
            values = {"trigger": trigger, "reason": reason, "status": "requested", "stage": "", "holder": ""}
            await change.execute(
                insert(retrain_runs).values(run_id=run_id, created_at=change.transaction.now, progress=0.0, **values)
            )
        return run_id

    # ---- inside

    async def _insert_policy(self, change: Change, policy: PolicyVersion) -> None:
        await change.execute(
            change.transaction.insert(policy_versions).values(**_fields(policy)).on_conflict_do_nothing()
        )

    async def _activate(self, change: Change, name: str, version: str) -> None:
        policies = change.before.policies
        active = {**policies.active, name: version}
        await change.put(names.POLICIES, replace(policies, active=active).as_dict())

    async def _insert_router(self, change: Change, router: RouterVersion, artifact: bytes) -> None:
        values = asdict(router) | {"artifact": artifact}
        await change.execute(change.transaction.insert(router_versions).values(**values).on_conflict_do_nothing())

    async def _need_router(self, change: Change, version: str) -> None:
        wanted = select(router_versions.c.version).where(router_versions.c.version == version)
        if not await change.is_there(wanted):
            raise UnknownVersion("router", version)

    async def _serve(self, change: Change, version: str) -> None:
        router = change.before.router
        if router.active is not None and router.active != version:
            await self._set_status(change, router.active, "retired")
        await self._set_status(change, version, "serving")
        previous = _with_previous(router.previous, router.active, version)
        await change.put(names.ROUTER, replace(router, active=version, canary=None, previous=previous).as_dict())

    async def _set_status(self, change: Change, version: str, status: str) -> None:
        await change.execute(update(router_versions).where(router_versions.c.version == version).values(status=status))

    async def _end_rollout(self, change: Change, canary: Canary, status: str, reason: str) -> None:
        await self._note_rollout(change, replace(canary, stage=status), status, reason)
        now = change.transaction.now
        await change.execute(update(rollouts).where(rollouts.c.rollout_id == canary.rollout_id).values(ended_at=now))
        if status != "complete":
            await self._set_status(change, canary.version, "rolled_back" if status == "rolled_back" else "candidate")

    async def _note_rollout(self, change: Change, canary: Canary, status: str, reason: str) -> None:
        now = change.transaction.now
        mine = rollouts.c.rollout_id == canary.rollout_id
        found = await change.transaction.connection.execute(select(rollouts.c.history).where(mine))
        history = list(found.scalar() or [])
        history.append(
            {"at": now.isoformat(), "stage": canary.stage, "share": canary.share, "by": change.by, "reason": reason}
        )
        values = {"status": status, "stage": canary.stage, "share": canary.share, "reason": reason}
        await change.execute(update(rollouts).where(mine).values(updated_at=now, history=history, **values))


def _check_active(before: ControlState, name: str, expected: str | None) -> None:
    found = before.policies.active.get(name, "")
    if expected is not None and found != expected:
        raise Conflict(f"Policy {name!r}", expected or "none", found or "none")


async def _check_lease(transaction: ControlTransaction, lease: Lease) -> None:
    held = leases.c
    wanted = select(held.name).where(held.name == lease.name, held.token == lease.token, held.holder == lease.holder)
    if (await transaction.connection.execute(wanted)).first() is None:
        raise LeaseLost(lease.name)


def _with_previous(previous: tuple[str, ...], old: str | None, new: str | None) -> tuple[str, ...]:
    """Versions to go back to, newest first; ``none`` stands for serving without a router."""
    if old == new:
        return previous
    left = old or "none"
    return (left, *[each for each in previous if each not in (left, new or "none")])[:_MAX_PREVIOUS]


def _fields(policy: PolicyVersion) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in policy.__slots__}
