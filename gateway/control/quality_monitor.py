"""Monitors quality: whether floors are held, whether anything drifted, whether a tenant behaves oddly; and acts on it.

It runs on the leader. Where it stands is kept in the database with every look, so that neither a restart nor another
leader resets a test. What it concludes is written under the leader's lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.config.sections import MonitorConfig
from gateway.control.control_plane import ControlPlane
from gateway.control.control_state import Quarantine
from gateway.control.drift_watch import DriftRule, DriftView, DriftWatch, watch_drift
from gateway.control.equivalent_versions import EquivalentVersions, carry_evidence
from gateway.control.floor_findings import (
    FloorEvidence,
    FloorFinding,
    find_floor,
    quarantine_levels,
    recent,
    released_level,
)
from gateway.control.group_watch import GroupWatch
from gateway.control.router_set import recovering_since
from gateway.control.tenant_watch import REASONS, TenantWatches, watch_tenants
from gateway.ids import first_at, is_uuid, time_of
from gateway.store.control_records import Lease
from gateway.store.monitoring import CheckedRow, MonitorReader
from policies.anomaly import AlertRule
from policies.certificate import FloorStatus
from policies.judge_correction import GoldCounts

_log = logging.getLogger("suffice.monitor")

STATE = "monitor"
_MAX_ROWS = 20_000
_MAX_NEW = 5_000
# Decisions of tenants are read until none is left, but at most so many times as many in one look.
_MAX_BATCHES = 40
_AHEAD = timedelta(seconds=60)
# Over a long log the floors take a while; they have at most one part in so many of the time.
_REST = 20.0
# Clocks of workers differ and commits are late: what ended this long before the last look may still turn up.
_OVERLAP = timedelta(seconds=60)
_SETTLED = timedelta(seconds=5)
_BEGINNING = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class MonitorState:
    """Holds the monitor's progress; stored as JSON.

    Attributes
    ----------
    cursor : end of the newest check that was counted; ``counted`` are the ids within the overlap before it
    last_request : newest decision the tenants' watch has seen
    held : policy@router -> whether its floor was ever shown to be held
    """

    cursor: datetime = _BEGINNING
    counted: frozenset[str] = frozenset()
    last_request: str = ""
    held: Mapping[str, bool] = field(default_factory=dict)
    drift: DriftWatch = field(default_factory=DriftWatch)
    tenants: TenantWatches = field(default_factory=TenantWatches)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "cursor": self.cursor.isoformat(),
            "counted": sorted(self.counted),
            "last_request": self.last_request,
            "held": dict(self.held),
            "drift": self.drift.as_dict(),
            "tenants": self.tenants.as_dict(),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> MonitorState:
        """Return what :meth:`as_dict` wrote; an empty mapping is the beginning."""
        if not stored:
            return cls()
        return cls(
            datetime.fromisoformat(stored["cursor"]),
            frozenset(stored["counted"]),
            str(stored["last_request"]),
            dict(stored["held"]),
            DriftWatch.from_dict(stored["drift"]),
            TenantWatches.from_dict(stored["tenants"]),
        )


class QualityMonitor:
    """Looks, concludes, acts, reports.

    Parameters
    ----------
    plane : the active state, and how it is changed
    reader : of checked answers
    config : how much is concluded from how much
    clock : wall clock, aware

    Attributes
    ----------
    tenants_behind_s : age of the newest decision that the tenants' watch has seen, while more of them wait; else 0
    """

    def __init__(
        self,
        plane: ControlPlane,
        reader: MonitorReader,
        config: MonitorConfig,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._plane = plane
        self._reader = reader
        self._config = config
        self._clock = clock
        self._top = len(plane.ladder)
        self._groups = GroupWatch(plane, reader, config, clock)
        self._continuity = EquivalentVersions(plane)
        self.tenants_behind_s = 0.0
        self._has_new = False
        self._floor_due_s = float("-inf")

    # ---- reports, on any server

    async def floor_report(self) -> dict[str, Any]:
        """Return every policy's certificate as things stand, tier by tier, with the raw rate beside it."""
        evidence, since = await self._evidence()
        findings = await self._findings(evidence)
        return {
            "at": self._clock().isoformat(),
            "window_days": self._config.window_days,
            "policies": [each.as_dict() for each in findings],
            "groups": await self._groups.report(evidence, since),
        }

    async def drift_report(self) -> dict[str, Any]:
        """Return the state of every drift test and of the tenants' watch."""
        state = await self._load()
        return {
            "at": self._clock().isoformat(),
            "false_alarm": self._config.false_alarm,
            "counted_until": state.cursor.isoformat(),
            "views": [view.shown() for view in state.drift.views.values()],
            "tenants": {
                tenant: {
                    "num_baseline": each.num_baseline,
                    "top_share_at_first": each.num_baseline_top / each.num_baseline if each.num_baseline else None,
                    "is_watched": each.state is not None,
                    "is_alarmed": each.is_alarmed,
                }
                for tenant, each in state.tenants.watches.items()
            },
        }

    # ---- the look

    async def look(self, lease: Lease, *, at_once: bool = False) -> None:
        """One look, under the leader's lease: read what is new, conclude, act, and keep where it stands.

        Parameters
        ----------
        at_once : judge the floors even if they were judged a moment ago

        Raises
        ------
        LeaseLost, StoreUnavailable and its kinds
        """
        state = await self._with_resolved(await self._load())
        gold = await self._reader.gold(self._config.min_gold)
        state, alarmed, is_new = await self._watch_drift(state, gold)
        state, tenants = await self._watch_tenants(state)
        findings: list[FloorFinding] = []
        recently: list[FloorFinding] = []
        doubted: list[FloorFinding] = []
        self._has_new |= is_new
        if self._has_new and (alarmed or at_once or time.monotonic() >= self._floor_due_s):
            begun_s = time.monotonic()
            evidence, since = await self._evidence()
            evidence = await self._groups.look(evidence, since, lease)
            findings = await self._findings(evidence)
            recently = await self._recently(evidence, alarmed)
            doubted = [each for each in findings if self._is_in_doubt(each, state)]
            state = replace(state, held=_held(state.held, findings))
            await self._release(findings, evidence, lease)
            self._has_new = False
            self._floor_due_s = time.monotonic() + _REST * (time.monotonic() - begun_s)
        # First the conclusions, which may be made twice, then the place: the other order could lose one.
        await self._act(alarmed, recently, doubted, findings, tenants, lease)
        await self._save(state, lease)

    async def _with_resolved(self, state: MonitorState) -> MonitorState:
        """Tests whose alert a person has resolved begin anew: the present is the baseline then."""
        views = [view for view in state.drift.views.values() if view.state.is_alarmed]
        tenants = [tenant for tenant, each in state.tenants.watches.items() if each.is_alarmed]
        if not views and not tenants:
            return state
        unresolved = {(each.kind, each.subject) for each in await self._plane.store.list_alerts(only_open=True)}
        drift, watches = state.drift, state.tenants
        for view in views:
            if ("drift", view.key) not in unresolved:
                drift = drift.renewed(view.family, view.name, view.router_version)
        for tenant in tenants:
            if ("tenant", tenant) not in unresolved:
                watches = watches.renewed(tenant)
        return replace(state, drift=drift, tenants=watches)

    async def _watch_drift(
        self, state: MonitorState, gold: GoldCounts | None
    ) -> tuple[MonitorState, list[DriftView], bool]:
        since = state.cursor - _OVERLAP if state.cursor > _BEGINNING else _BEGINNING
        found = [row async for row in self._reader.checked(finished_since=since, limit=_MAX_NEW)]
        rows = [row for row in found if row.verification_id not in state.counted]
        if not rows:
            return state, [], False
        config = self._config
        rule = DriftRule(config.drift_in_order, config.drift_risen, config.false_alarm)
        permitted = {name: 1.0 - policy.quality_floor for name, policy in self._plane.policies.items()}
        watch, alarmed = await asyncio.to_thread(watch_drift, state.drift, rows, rule, permitted, gold)
        cursor = max(state.cursor, max(row.finished_at for row in rows))
        counted = frozenset(row.verification_id for row in found if row.finished_at >= cursor - _OVERLAP)
        watch = watch.without(self._plane.routers_at_hand())
        return replace(state, cursor=cursor, counted=counted, drift=watch), alarmed, True

    async def _watch_tenants(self, state: MonitorState) -> tuple[MonitorState, list[str]]:
        last, now = state.last_request or await self._reader.last_request_id(), self._clock()
        if not state.last_request:
            return replace(state, last_request=last), []
        if is_uuid(last) and time_of(last) > now + _AHEAD:
            # A clock was set back: ids made from now on would sort before the place, and none be seen until then.
            _log.warning("the newest decision seen is of %s, later than now: the watch goes on from now", time_of(last))
            state = replace(state, last_request=first_at(now))
        rule = AlertRule(self._config.tenant_baseline, self._config.tenant_min_rise, self._config.false_alarm)
        alarmed: list[str] = []
        self.tenants_behind_s = 0.0
        for _ in range(_MAX_BATCHES):
            decisions = await self._reader.decisions(
                after_id=state.last_request, before=now - _SETTLED, reasons=REASONS, limit=_MAX_NEW
            )
            if not decisions:
                return state, alarmed
            watches, found = await asyncio.to_thread(watch_tenants, state.tenants, decisions, rule, self._top)
            state, alarmed = replace(state, last_request=decisions[-1].request_id, tenants=watches), alarmed + found
            if len(decisions) < _MAX_NEW:
                return state, alarmed
        self.tenants_behind_s = max(0.0, (now - time_of(state.last_request)).total_seconds())
        return state, alarmed

    def _is_in_doubt(self, finding: FloorFinding, state: MonitorState) -> bool:
        """Broken; or no longer shown after it once was, with an estimate beyond what is permitted."""
        certificate = finding.certificate
        if certificate.num_checked < self._config.min_checked:
            return False
        if finding.status is FloorStatus.BROKEN:
            return True
        was_held = state.held.get(_name(finding), False)
        is_beyond = certificate.loss > 1.0 - finding.policy.quality_floor
        return was_held and finding.status is FloorStatus.INSUFFICIENT and is_beyond

    # ---- what follows

    async def _act(
        self,
        alarmed: list[DriftView],
        recently: list[FloorFinding],
        doubted: list[FloorFinding],
        findings: list[FloorFinding],
        tenants: list[str],
        lease: Lease,
    ) -> None:
        for view in alarmed:
            await self._alert("drift", "critical", view.key, view.shown())
        for finding in doubted:
            await self._alert("floor", "critical", _name(finding), finding.as_dict())
        for finding in findings:
            if finding.status is FloorStatus.HELD:
                await self._plane.store.resolve_alerts("floor", _name(finding), self._clock())
        for tenant in tenants:
            await self._alert("tenant", "warning", tenant, {"problem": "its share of the top tier jumped"})
        if not self._config.act:
            return
        for view in alarmed:
            if view.router_version != self._plane.routers.version:
                continue  # a canary router has a guard of its own
            reason = f"drift of {view.family} {view.name} after {view.state.num_checked} checked answers"
            for finding in recently:
                if view.family == "policy" and finding.policy.name == view.name:
                    await self._quarantine_tiers(finding, reason, lease)
            await self._plane.writer.request_retrain("drift", reason)
        for finding in doubted:
            reason = f"floor {finding.policy.quality_floor} {finding.status.value}, loss {finding.certificate.loss:.4f}"
            if await self._quarantine_tiers(finding, reason, lease):
                await self._plane.writer.request_retrain("drift", reason)
        await self._ask_again()

    async def _ask_again(self) -> None:
        """Ask for another retrain once enough was checked since the last one: quarantined, drifted or foreign.

        Enough is never less than a quarter more than before, lest ever longer logs are read for ever less news. Also
        beside a rollout under way: a router that is better still takes its place.
        """
        version, now = self._plane.routers.version, self._clock()
        quarantine = {name: self._plane.state.quarantine(name, version) for name in self._plane.policies}
        in_doubt = [name for name, tiers in quarantine.items() if tiers]
        begun, what = recovering_since(self._plane.routers.serving.router, now), "recovering from a drift"
        if in_doubt:
            begun = min(datetime.fromisoformat(each.since) for name in in_doubt for each in quarantine[name].values())
            what = f"{', '.join(in_doubt)} in doubt"
        elif begun is None:
            what = "prompts foreign to the router"
        window = now - timedelta(days=self._config.window_days)
        found = await self._reader.learnable(max(window, begun or window), is_foreign=begun is None)
        if found is None or found.num_new < max(2 * self._config.min_checked, found.num // 4):
            return
        await self._plane.writer.request_retrain("drift", f"{what}: {found.num_new} checked since the last retrain")

    async def _quarantine_tiers(self, finding: FloorFinding, reason: str, lease: Lease) -> bool:
        """Move traffic up at once. A tier already closed stays so; True when anything changed."""
        asked = quarantine_levels(finding, self._config.min_checked)
        before = self._plane.state.quarantine(finding.policy.name, finding.router_version)
        if all(tier in before and before[tier].least >= least for tier, least in asked.items()):
            return False
        _log.warning("policy %s is tightened: %s; %s", finding.policy.name, asked, reason)
        return await self._plane.writer.quarantines.add(
            finding.policy.name, finding.router_version, asked, reason, by="monitor", lease=lease
        )

    async def _release(self, findings: list[FloorFinding], evidence: FloorEvidence, lease: Lease) -> None:
        """Release what has been shown to hold the floor since its quarantine began."""
        if not self._config.act:
            return
        for finding in findings:
            levels: dict[int, float | None] = {}
            for tier, asked in self._quarantine(finding).items():
                rows = [row for row in evidence.rows if _is_of(row, finding)]
                level = released_level(rows, finding.policy, tier, asked, self._config.min_checked)
                if level is not None:
                    levels[tier] = level if level > finding.policy.threshold(tier) else None
            if levels:
                _log.info("policy %s is loosened: %s", finding.policy.name, levels)
                await self._plane.writer.quarantines.release(
                    finding.policy.name,
                    finding.router_version,
                    levels,
                    by="monitor",
                    reason="shown to hold the floor again",
                    lease=lease,
                )

    async def _alert(self, kind: str, severity: str, subject: str, body: Mapping[str, Any]) -> None:
        if await self._plane.alert(kind, severity, subject, body, self._clock()):
            _log.warning("alert: %s of %s", kind, subject)

    # ---- inside

    async def _evidence(self) -> tuple[FloorEvidence, datetime]:
        """Return the evidence that findings rest on, and its beginning."""
        since = self._clock() - timedelta(days=self._config.window_days)
        rows = await self._reader.newest_checked(created_since=since, limit=_MAX_ROWS)
        if len(rows) == _MAX_ROWS:
            # The traffic must be of the same time as the rows that stand for it.
            since = min(row.created_at for row in rows)
        rows = await self._reader.by_turn(rows)
        traffic, drawn = await self._reader.traffic(since), await self._reader.drawn(since)
        gold = await self._reader.gold(self._config.min_gold)
        evidence = FloorEvidence(rows, traffic, drawn, gold, self._plane.state.groups)
        return await asyncio.to_thread(carry_evidence, evidence, await self._continuity.versions(traffic)), since

    async def _findings(self, evidence: FloorEvidence) -> list[FloorFinding]:
        version = self._plane.routers.version
        found = []
        for policy in self._plane.policies.values():
            top, quarantine = policy.top(self._plane.ladder), self._plane.state.quarantine(policy.name, version)
            found.append(await asyncio.to_thread(find_floor, policy, version, top, evidence, quarantine))
        return found

    async def _recently(self, evidence: FloorEvidence, alarmed: list[DriftView]) -> list[FloorFinding]:
        """Return the policies that drifted, judged by what was checked last: what was before no longer holds."""
        drifted = {view.name for view in alarmed if view.family == "policy"}
        version, found = self._plane.routers.version, []
        for policy in self._plane.policies.values():
            if policy.name in drifted:
                last = recent(evidence, policy, version, 2 * self._config.min_checked)
                top, quarantine = policy.top(self._plane.ladder), self._plane.state.quarantine(policy.name, version)
                finding = await asyncio.to_thread(find_floor, policy, version, top, last, quarantine)
                # A drift caused by quarantined groups is dealt with, where the rest is as it should be.
                is_beyond = finding.certificate.loss > 1.0 - policy.quality_floor
                if is_beyond or not self._plane.state.group_quarantine(policy.name, version):
                    found.append(finding)
        return found

    def _quarantine(self, finding: FloorFinding) -> Mapping[int, Quarantine]:
        return self._plane.state.quarantine(finding.policy.name, finding.router_version)

    async def _load(self) -> MonitorState:
        rows = await self._plane.store.rows()
        return MonitorState.from_dict(rows[STATE][0]) if STATE in rows else MonitorState()

    async def _save(self, state: MonitorState, lease: Lease) -> None:
        await self._plane.store.put_quietly(STATE, state.as_dict(), lease.holder, self._clock(), lease)


def _held(before: Mapping[str, bool], findings: list[FloorFinding]) -> dict[str, bool]:
    present = {_name(each) for each in findings}
    found = {name: held for name, held in before.items() if name in present}
    return found | {_name(each): True for each in findings if each.status is FloorStatus.HELD}


def _name(finding: FloorFinding) -> str:
    return f"{finding.policy.name}@{finding.router_version}"


def _is_of(row: CheckedRow, finding: FloorFinding) -> bool:
    return (row.policy_name, row.router_version) == (finding.policy.name, finding.router_version)
