"""Changes to the quarantines: tiers, and tenants or domains, that must reach more than their policy asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gateway.control import control_state as names
from gateway.control.audited_change import Audit, AuditedChange, ChangeMaker
from gateway.control.control_state import (
    ControlState,
    Quarantine,
    group_quarantines_as_dict,
    quarantines_as_dict,
    router_key,
)
from gateway.store.control_records import Lease

T = TypeVar("T")


class QuarantineWriter:
    """Puts tiers in quarantine and releases them, for all requests of a policy or for one tenant or domain."""

    def __init__(self, changes: ChangeMaker) -> None:
        self._changes = changes

    async def add(
        self,
        policy: str,
        router: str | None,
        tiers: Mapping[int, float],
        reason: str,
        *,
        by: str,
        lease: Lease | None = None,
    ) -> bool:
        """Quarantine tiers under a router; a threshold of before is never lowered. True when anything changed."""
        async with self._changes.change(by, lease=lease) as change:
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
        """Release tiers: tier -> the new least P(as good), None to ask no more than the policy."""
        async with self._changes.change(by, lease=lease) as change:
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
        """Set the quarantines of a policy's groups under a router; a group with no tier is released, others stay."""
        async with self._changes.change(by, lease=lease) as change:
            before = change.before
            mine = {**before.group_quarantine(policy, router), **groups}
            asked = {name: _kept(before, routers, router) for name, routers in before.groups.items()}
            asked.setdefault(policy, {})[router_key(router)] = mine
            await change.put(names.GROUPS, group_quarantines_as_dict(asked))

    async def release_policy(self, policy: str, *, by: str, audit: Audit | None = None) -> None:
        """Release all tiers and groups of a policy, under every router."""
        async with self._changes.change(by, audit=audit) as change:
            left = {name: routers for name, routers in change.before.quarantines.items() if name != policy}
            await change.put(names.TIGHTENING, quarantines_as_dict(left))
            groups = {name: routers for name, routers in change.before.groups.items() if name != policy}
            await change.put(names.GROUPS, group_quarantines_as_dict(groups))

    async def _put_quarantine(
        self, change: AuditedChange, policy: str, router: str | None, tiers: Mapping[int, Quarantine]
    ) -> None:
        """Write one policy's quarantines, and forget those of routers that nothing can bring back."""
        before = change.before
        asked = {name: _kept(before, routers, router) for name, routers in before.quarantines.items()}
        asked.setdefault(policy, {})[router_key(router)] = dict(tiers)
        await change.put(names.TIGHTENING, quarantines_as_dict(asked))


def _kept(state: ControlState, routers: Mapping[str, T], router: str | None) -> dict[str, T]:
    """Return the entries of routers that serve, may serve again, or are written about now."""
    canary = state.router.canary
    known = {state.router.active, *state.router.previous, canary.version if canary else None, router}
    kept = {router_key(each) for each in known}
    return {version: each for version, each in routers.items() if version in kept}
