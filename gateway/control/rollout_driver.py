"""Drives a rollout on the leader: fed by decisions in shadow and by checked answers, moved on or back by the rules.

The machine is :mod:`policies.rollout`; here it is given what happened, and its stage becomes the active one.

Checks of two kinds tell what the new router is worth. Those of answers that it decided itself; and those of answers of
the very tier that it would have chosen for a request of the serving router, known from the shadow: served and checked,
or asked beside the dearest tier because the tier was quarantined. Requests go to one router or the other by sticky key,
so each kind alone is a sample of the same traffic, and within each kind an answer weighs by its own chance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gateway.config.sections import ControlConfig, MonitorConfig
from gateway.control.control_plane import ControlPlane
from gateway.control.control_state import Canary
from gateway.control.drift_watch import DriftRule, loss_of, make_design, weigh
from gateway.store.control_records import Lease, RolloutRow
from gateway.store.monitoring import MonitorReader
from policies.rollout import Rollout, RolloutPlan, RolloutStage, record, roll_back, share

_log = logging.getLogger("suffice.rollout")

_OVERLAP = timedelta(seconds=60)
_MAX_NEW = 5_000


@dataclass(frozen=True, slots=True)
class RolloutState:
    """A rollout as it is stored: plan, machine, and how far it was fed.

    ``seen`` and ``seen_beside`` are the last inclusion probabilities of the router's own answers and of the others,
    ``num_beside`` how many of the others were counted.
    """

    plan: RolloutPlan
    rollout: Rollout
    reads: str
    cursor: datetime
    counted: frozenset[str] = frozenset()
    seen: tuple[float, ...] = ()
    seen_beside: tuple[float, ...] = ()
    num_beside: int = 0
    num_shadow: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": msgspec.to_builtins(self.plan),
            "rollout": msgspec.to_builtins(self.rollout),
            "reads": self.reads,
            "cursor": self.cursor.isoformat(),
            "counted": sorted(self.counted),
            "seen": list(self.seen),
            "seen_beside": list(self.seen_beside),
            "num_beside": self.num_beside,
            "num_shadow": self.num_shadow,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RolloutState:
        """Return what :meth:`as_dict` wrote."""
        return cls(
            msgspec.convert(stored["plan"], RolloutPlan),
            msgspec.convert(stored["rollout"], Rollout),
            str(stored["reads"]),
            datetime.fromisoformat(stored["cursor"]),
            frozenset(stored["counted"]),
            tuple(stored["seen"]),
            tuple(stored.get("seen_beside", ())),
            int(stored.get("num_beside", 0)),
            int(stored["num_shadow"]),
        )


class RolloutDriver:
    """One rollout at a time.

    Parameters
    ----------
    plane : the active state, and how it is changed
    reader : of checked answers
    control, monitor : stages, and what the guard looks for
    clock : wall clock, aware
    """

    def __init__(
        self,
        plane: ControlPlane,
        reader: MonitorReader,
        control: ControlConfig,
        monitor: MonitorConfig,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._plane = plane
        self._reader = reader
        self._control = control
        self._monitor = monitor
        self._clock = clock

    async def step(self, lease: Lease) -> None:
        """Feed the rollout under way with what is new, and bring its stage into force when it moved.

        Raises
        ------
        LeaseLost, Conflict, StoreUnavailable and its kinds
        """
        canary = self._plane.state.router.canary
        row = await self._plane.store.get_rollout(canary.rollout_id) if canary is not None else None
        if canary is None or row is None:
            return
        state = RolloutState.from_dict(row.state) if row.state else await self._begin(row)
        if canary.version in self._plane.refused:
            rollout = roll_back(state.rollout, "It cannot be loaded.", self._clock().timestamp())
            after = replace(state, rollout=rollout)
        else:
            after = await self._fed(state, row)
        before = state.rollout
        if (after.rollout.stage, after.rollout.step) == (before.stage, before.step):
            await self._plane.store.save_rollout(row.rollout_id, after.as_dict(), self._clock(), lease)
            return
        await self._move(canary, after, lease)

    async def _begin(self, row: RolloutRow) -> RolloutState:
        control, monitor = self._control, self._monitor
        await self._plane.store.forget_shadow_decisions(self._clock() - timedelta(days=monitor.window_days))
        rule = DriftRule(monitor.drift_in_order, monitor.drift_risen, monitor.false_alarm)
        permitted = max((1.0 - policy.quality_floor for policy in self._plane.policies.values()), default=0.0)
        in_order = min(max(rule.in_order, permitted), 0.99)
        design, reads = make_design(rule, in_order, rule.false_alarm, await self._reader.gold(self._monitor.min_gold))
        plan = RolloutPlan(
            design,
            control.rollout_shares,
            control.rollout_min_stage_s,
            control.rollout_min_shadow_decisions,
            control.rollout_min_checked,
            control.rollout_max_stage_s,
        )
        rollout = Rollout.start(row.router_version, plan, row.started_at.timestamp())
        return RolloutState(plan, rollout, reads, row.started_at)

    async def _fed(self, state: RolloutState, row: RolloutRow) -> RolloutState:
        version, since = row.router_version, max(row.started_at, state.cursor - _OVERLAP)
        found = [
            each
            async for each in self._reader.tried(version, finished_since=since, limit=_MAX_NEW)
            if each.created_at >= row.started_at and each.dear_tier == self._top(each.policy_name)
        ]
        new = [each for each in found if each.verification_id not in state.counted]
        losses, weights, seen, seen_beside = [], [], state.seen, state.seen_beside
        for each in new:
            if each.router_version == version:
                weight, seen = weigh(each.inclusion, seen)
            else:
                weight, seen_beside = weigh(each.inclusion, seen_beside)
            losses.append(loss_of(each, state.reads))
            weights.append(weight)
        cursor = max([state.cursor, *(each.finished_at for each in found)])
        num_shadow = state.num_shadow
        if state.rollout.stage is RolloutStage.SHADOW:
            num_shadow, _, _ = await self._plane.store.count_shadow_decisions(row.router_version, row.started_at)
        rollout = record(
            state.plan,
            state.rollout,
            num_decisions=num_shadow - state.num_shadow,
            losses=losses,
            weights=weights,
            now_s=self._clock().timestamp(),
        )
        return replace(
            state,
            rollout=rollout,
            cursor=cursor,
            counted=frozenset(each.verification_id for each in found if each.finished_at >= cursor - _OVERLAP),
            seen=seen,
            seen_beside=seen_beside,
            num_beside=state.num_beside + sum(each.router_version != version for each in new),
            num_shadow=num_shadow,
        )

    def _top(self, policy_name: str) -> int:
        """Return the dearest tier that a policy permits; its answers are what others are judged by."""
        policy = self._plane.policies.get(policy_name)
        return policy.top(self._plane.ladder) if policy else len(self._plane.ladder)

    async def _move(self, canary: Canary, state: RolloutState, lease: Lease) -> None:
        rollout = state.rollout
        moved = replace(canary, stage=rollout.stage.value, share=share(state.plan, rollout))
        reason = rollout.reason or f"{rollout.stage.value} at {moved.share:.0%}: the stage before passed."
        _log.info("router %s: %s", canary.version, reason)
        await self._plane.writer.routers.move_rollout(moved, state.as_dict(), reason, by="rollout", lease=lease)
        if rollout.stage is RolloutStage.ROLLED_BACK:
            body = {"rollout_id": canary.rollout_id, "problem": reason}
            await self._plane.alert("rollout", "critical", canary.version, body, self._clock())
