"""Every change to what is in force.

``expected_version`` (the version of the row that was read) or ``if_active`` (the policy version that was read) turn a
change into a compare-and-set; a change that comes too late raises :class:`Conflict` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from sqlalchemy import insert, select

from gateway.control import control_state as names
from gateway.control.audited_change import Audit, AuditedChange
from gateway.control.control_state import ControlState, Quarantine, group_quarantines_as_dict, quarantines_as_dict
from gateway.control.policy_writer import PolicyWriter
from gateway.ids import uuid7
from gateway.store.control_records import AuditEntry, Lease
from gateway.store.tables import retrain_runs

T = TypeVar("T")


class ControlWriter(PolicyWriter):
    """The one way to change what is in force: kill switch, policies, routers, tightening; and to ask for a retrain."""

    async def quarantine(
        self,
        policy: str,
        router: str | None,
        tiers: Mapping[int, float],
        reason: str,
        *,
        by: str,
        lease: Lease | None = None,
    ) -> bool:
        """Ask more of some tiers under a router; what was asked before is never lowered. True when anything changed."""
        async with self.change(by, lease=lease) as change:
            mine = dict(change.before.quarantine(policy, router))
            since = change.transaction.now.isoformat()
            higher = {t: least for t, least in tiers.items() if t not in mine or least > mine[t].least}
            mine.update({tier: Quarantine(least, reason, since) for tier, least in higher.items()})
            await self._put_quarantine(change, policy, router, mine)
        return bool(higher)

    async def release(
        self,
        policy: str,
        router: str | None,
        tiers: Mapping[int, float | None],
        *,
        by: str,
        reason: str = "",
        lease: Lease | None = None,
    ) -> None:
        """Ask less again: tier -> the new least P(as good), None to ask no more than the policy."""
        async with self.change(by, lease=lease) as change:
            mine = dict(change.before.quarantine(policy, router))
            for tier, least in tiers.items():
                if least is None:
                    mine.pop(tier, None)
                elif tier in mine:
                    mine[tier] = Quarantine(least, reason or mine[tier].reason, change.transaction.now.isoformat())
            await self._put_quarantine(change, policy, router, mine)

    async def set_groups(
        self,
        policy: str,
        router: str | None,
        groups: Mapping[str, Mapping[int, Quarantine]],
        *,
        by: str,
        lease: Lease | None = None,
    ) -> None:
        """Ask this of the groups of a policy under a router; one with no tier is in doubt no more, others stay."""
        async with self.change(by, lease=lease) as change:
            before = change.before
            mine = {**before.group_quarantine(policy, router), **groups}
            asked = {name: _kept(before, routers, router) for name, routers in before.groups.items()}
            asked.setdefault(policy, {})[router or "none"] = mine
            await change.put(names.GROUPS, group_quarantines_as_dict(asked))

    async def release_policy(self, policy: str, *, by: str, audit: Audit | None = None) -> None:
        """Ask no more than the policy of all its tiers and groups, under every router."""
        async with self.change(by, audit=audit) as change:
            left = {name: routers for name, routers in change.before.quarantines.items() if name != policy}
            await change.put(names.TIGHTENING, quarantines_as_dict(left))
            groups = {name: routers for name, routers in change.before.groups.items() if name != policy}
            await change.put(names.GROUPS, group_quarantines_as_dict(groups))

    async def _put_quarantine(
        self, change: AuditedChange, policy: str, router: str | None, tiers: Mapping[int, Quarantine]
    ) -> None:
        """Write one policy's, and forget what was asked of routers that nothing can bring back."""
        before = change.before
        asked = {name: _kept(before, routers, router) for name, routers in before.quarantines.items()}
        asked.setdefault(policy, {})[router or "none"] = dict(tiers)
        await change.put(names.TIGHTENING, quarantines_as_dict(asked))

    async def request_retrain(
        self, trigger: str, reason: str = "", *, audit: Callable[[str], AuditEntry] | None = None
    ) -> str:
        """Ask for a new router unless one is asked for or being made already. Returns the run's id.

        ``audit`` makes the entry from that id.
        """
        async with self.change(trigger) as change:
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


def _kept(state: ControlState, routers: Mapping[str, T], router: str | None) -> dict[str, T]:
    """What belongs to routers that serve, may serve again, or are written about now."""
    canary = state.router.canary
    known = {state.router.active, *state.router.previous, canary.version if canary else None, router}
    kept = {each or "none" for each in known}
    return {version: each for version, each in routers.items() if version in kept}
