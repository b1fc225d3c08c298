"""Quarantines one tenant or one domain while the rest is served as before, and releases what it shows to hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from gateway.config.sections import MonitorConfig
from gateway.control.control_plane import ControlPlane
from gateway.control.control_state import Quarantine, group_of
from gateway.control.equivalent_versions import carry_traffic
from gateway.control.floor_findings import FloorEvidence, released_level
from gateway.control.group_findings import GroupScope, GroupTraffic, groups_to_judge, judge_groups, rows_of, single_out
from gateway.store.control_records import Lease
from gateway.store.monitoring import MonitorReader

_log = logging.getLogger("suffice.monitor")


class GroupWatch:
    """The part of the watch that looks tenant by tenant and domain by domain.

    Parameters
    ----------
    plane : the active state, and how it is changed
    reader : of the traffic that checked answers stand for
    config : how much is concluded from how much
    clock : wall clock, aware
    """

    def __init__(
        self, plane: ControlPlane, reader: MonitorReader, config: MonitorConfig, clock: Callable[[], datetime]
    ) -> None:
        self._plane = plane
        self._reader = reader
        self._config = config
        self._clock = clock

    async def look(self, evidence: FloorEvidence, since: datetime, lease: Lease) -> FloorEvidence:
        """Single out and give back. Returns the evidence with what is asked of groups from now on.

        Parameters
        ----------
        since : begin of the evidence's traffic

        Raises
        ------
        LeaseLost, StoreUnavailable and its kinds
        """
        for scope in self._scopes():
            groups = groups_to_judge(evidence.rows, scope)
            traffic = carry_traffic(await self._traffic(groups, since), evidence.versions)
            asked = self._asked(scope)
            now = self._clock().isoformat()
            found = await asyncio.to_thread(single_out, scope, groups, evidence, traffic, asked, now)
            released = self._released(scope, {**asked, **found}, evidence, now)
            await self._say(scope, found, released)
            if self._config.act and (found or released):
                await self._plane.writer.quarantines.set_groups(
                    scope.policy.name, scope.router_version, {**found, **released}, by="monitor", lease=lease
                )
            if self._config.act and found:
                names = ", ".join(found)
                await self._plane.writer.request_retrain("drift", f"{names} below the floor of {scope.policy.name}")
        return replace(evidence, groups=self._plane.state.groups)

    async def report(self, evidence: FloorEvidence, since: datetime) -> list[dict[str, Any]]:
        """Every group that was checked enough, under every policy, with its certificate and what is asked of it."""
        found: list[dict[str, Any]] = []
        for scope in self._scopes():
            groups = groups_to_judge(evidence.rows, scope)
            traffic = carry_traffic(await self._traffic(groups, since), evidence.versions)
            asked = self._asked(scope)
            found += [
                each.as_dict()
                for each in await asyncio.to_thread(judge_groups, scope, groups, evidence, traffic, asked)
            ]
        return found

    def _scopes(self) -> list[GroupScope]:
        version, state = self._plane.routers.version, self._plane.state
        return [
            GroupScope(
                policy,
                version,
                policy.top(self._plane.ladder),
                state.quarantine(policy.name, version),
                self._config.min_checked,
            )
            for policy in self._plane.policies.values()
        ]

    def _asked(self, scope: GroupScope) -> Mapping[str, Mapping[int, Quarantine]]:
        return self._plane.state.group_quarantine(scope.policy.name, scope.router_version)

    async def _traffic(self, groups: Sequence[str], since: datetime) -> GroupTraffic:
        found: dict[tuple[str, Any], Any] = {}
        for family in ("tenant", "domain"):
            prefix = group_of(family, "")
            names = [group.removeprefix(prefix) for group in groups if group.startswith(prefix)]
            if names:
                part = await self._reader.traffic_of("tenant" if family == "tenant" else "domain", names, since)
                found |= {(group_of(family, name), key): each for (name, key), each in part.items()}
        return found

    def _released(
        self, scope: GroupScope, asked: Mapping[str, Mapping[int, Quarantine]], evidence: FloorEvidence, now: str
    ) -> dict[str, dict[int, Quarantine]]:
        """Groups of which less is asked from now on, with all that is still asked of them."""
        found: dict[str, dict[int, Quarantine]] = {}
        for group, tiers in asked.items():
            mine = [row for row in rows_of(group, evidence.rows) if row.policy_name == scope.policy.name]
            mine = [row for row in mine if row.router_version == scope.router_version]
            left = dict(tiers)
            for tier, each in tiers.items():
                level = released_level(mine, scope.policy, tier, each, scope.min_checked)
                if level is not None and level <= scope.policy.threshold(tier):
                    del left[tier]
                elif level is not None:
                    left[tier] = Quarantine(level, "shown to hold the floor again", now)
            if left != dict(tiers):
                found[group] = left
        return found

    async def _say(
        self,
        scope: GroupScope,
        found: Mapping[str, Mapping[int, Quarantine]],
        released: Mapping[str, Mapping[int, Any]],
    ) -> None:
        """Raise an alert where a quarantine begins, and resolve it where it ended."""
        subject = f"{scope.policy.name}@{scope.router_version}"
        for group, tiers in found.items():
            shown = {str(tier): each.as_dict() for tier, each in tiers.items()}
            body = {"problem": "below the floor while the rest holds it", "group": group, "tiers": shown}
            if await self._plane.alert("floor", "critical", f"{subject} {group}", body, self._clock()):
                _log.warning("policy %s is tightened for %s", scope.policy.name, group)
        for group, left in released.items():
            if not left:
                await self._plane.store.resolve_alerts("floor", f"{subject} {group}", self._clock())
