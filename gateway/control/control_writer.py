"""The one way to change what is active.

``expected_version`` (the version of the row that was read) or ``if_active`` (the policy version that was read) turn a
change into a compare-and-set; a change that comes too late raises :class:`Conflict` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select

from gateway.control import control_state as names
from gateway.control.audited_change import Audit, AuditedChange, ChangeMaker, Publish, tell_nobody
from gateway.control.control_state import ActivePolicies, KillSwitch, router_of
from gateway.control.policy_writer import PolicyWriter, insert_policy
from gateway.control.quarantine_writer import QuarantineWriter
from gateway.control.router_writer import RouterWriter, insert_router, set_status, with_previous
from gateway.ids import uuid7
from gateway.store.control import ControlStore
from gateway.store.control_records import AuditEntry, RouterVersion
from gateway.store.records import PolicyVersion
from gateway.store.tables import policy_versions, retrain_runs


class ControlWriter:
    """Changes the kill switch, asks for retrains, imports the configuration, and holds the writers of the rest.

    Attributes
    ----------
    changes : what every change is made with
    policies, routers, quarantines : the writers of each

    Parameters
    ----------
    store : the control tables
    publish : called after each commit
    clock : wall clock, aware
    """

    def __init__(
        self,
        store: ControlStore,
        publish: Publish = tell_nobody,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.store = store
        self.changes = ChangeMaker(store, publish, clock)
        self.policies = PolicyWriter(self.changes)
        self.routers = RouterWriter(self.changes)
        self.quarantines = QuarantineWriter(self.changes)

    async def set_kill_switch(
        self,
        on: bool,
        reason: str,
        *,
        by: str,
        expected_version: int | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Send all traffic to the top tier, or route again."""
        async with self.changes.change(
            by, row=names.KILL_SWITCH, expected_version=expected_version, audit=audit
        ) as change:
            await change.put(names.KILL_SWITCH, KillSwitch(on, reason).as_dict())

    async def apply_configuration(
        self, policies: Mapping[str, tuple[PolicyVersion, str]], router: tuple[str, RouterVersion | None, bytes]
    ) -> None:
        """Activate what the configuration says, unless it said so before and was overruled since.

        Parameters
        ----------
        policies : name -> (version, mark of what the configuration wrote)
        router : (version or ``none``, its entry, its bytes; no entry for a router that is not stored)
        """
        async with self.changes.change("config") as change:
            before = change.before.policies
            found = await _without_dropped(change, policies)
            for name, (policy, mark) in policies.items():
                await insert_policy(change, policy)
                if before.config.get(name) != mark or name not in found:
                    found[name] = policy.version
            marks = {name: mark for name, (_, mark) in policies.items()}
            await change.put(names.POLICIES, ActivePolicies(found, before.default, marks).as_dict())
            await _import_router(change, *router)

    async def request_retrain(
        self, trigger: str, reason: str = "", *, audit: Callable[[str], AuditEntry] | None = None
    ) -> str:
        """Ask for a new router unless one is asked for or being made already. Returns the run's id.

        ``audit`` makes the entry from that id.
        """
        async with self.changes.change(trigger) as change:
            open_runs = retrain_runs.c.status.in_(("requested", "running"))
            found = await change.transaction.connection.execute(select(retrain_runs.c.run_id).where(open_runs).limit(1))
            if (run_id := found.scalar()) is None:
                run_id = uuid7()
                values = {"trigger": trigger, "reason": reason, "status": "requested", "stage": "", "holder": ""}
                now = change.transaction.now
                await change.execute(insert(retrain_runs).values(run_id=run_id, created_at=now, progress=0.0, **values))
            if audit is not None:
                await change.transaction.audit(audit(str(run_id)))
        return str(run_id)


async def _without_dropped(change: AuditedChange, policies: Mapping[str, Any]) -> dict[str, str]:
    """Return the active policies, less those that only the configuration knew and does not name any more."""
    before = change.before.policies
    found = dict(before.active)
    for name in set(before.config) - set(policies) - {before.default}:
        stored = policy_versions.c
        wanted = select(stored.name).where(
            stored.name == name, stored.version == found.get(name, ""), stored.author == "config"
        )
        if await change.is_there(wanted):
            del found[name]
    return found


async def _import_router(change: AuditedChange, version: str, entry: RouterVersion | None, artifact: bytes) -> None:
    """Keep the configured router, and let it serve if the configuration named another one before."""
    before = change.before.router
    if entry is not None:
        await insert_router(change, entry, artifact)
    if before.config == version:
        return
    if before.active is not None:
        await set_status(change, before.active, "retired")
    await set_status(change, version, "serving")
    active = router_of(version)
    previous = with_previous(before.previous, before.active, active) if before.config else ()
    await change.put(names.ROUTER, replace(before, active=active, config=version, previous=previous).as_dict())
