"""Lets the weeks pass, and notes for every stretch of them what callers got and what it cost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gateway.simulate.accuracy import Accuracy
from gateway.simulate.scenario import Scenario
from gateway.simulate.simulated_clock import SimulatedClock
from gateway.simulate.simulated_gateway import ServedRequest, SimulatedGateway, open_gateway
from gateway.simulate.traffic_generator import TrafficGenerator

if TYPE_CHECKING:
    from gateway.config.settings import Settings

WEEK_S = 7 * 24 * 3600.0
# Requests served side by side, so that their rows share a commit.
_AT_ONCE = 64
# Standard errors below the floor that count as below it.
_SURE = 2.0

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Says how long to simulate, how busy, and how closely to look.

    Parameters
    ----------
    weeks : simulated
    requests_per_week : of all tenants
    looks_per_week : of the monitor and the rollout, every one after hours of traffic with the worker beside it
    hours_per_look : how often the worker empties its queue between two looks
    seed : of traffic, dice and judge
    """

    weeks: int = 12
    requests_per_week: int = 4000
    looks_per_week: int = 28
    hours_per_look: int = 6
    seed: int = 1


@dataclass(slots=True)
class SimulationInterval:
    """Counts what happened between two looks.

    Attributes
    ----------
    week : at its end
    num_right, num_top_right : answers that were right as served, and that the top tier would have had right
    tiers : requests by tier
    spent_usd, top_usd, checks_usd : on serving, on serving all by the top tier, on checks
    router_version : that served at its end
    events : alerts raised, changes of router, retrains, in words
    """

    week: float
    num_requests: int = 0
    num_right: int = 0
    num_top_right: int = 0
    tiers: Counter[int] = field(default_factory=Counter)
    spent_usd: Decimal = Decimal(0)
    top_usd: Decimal = Decimal(0)
    checks_usd: Decimal = Decimal(0)
    num_checks: int = 0
    num_tightened: int = 0
    router_version: str = ""
    events: list[str] = field(default_factory=list)

    @property
    def quality(self) -> float:
        """Return share of the top tier's right answers that was kept."""
        return self.num_right / self.num_top_right if self.num_top_right else 1.0

    def add(self, served: ServedRequest, top_usd: Decimal) -> None:
        """Count one request."""
        self.num_requests += 1
        self.num_right += served.asked.right[served.tier - 1]
        self.num_top_right += served.asked.right[-1]
        self.tiers[served.tier] += 1
        self.spent_usd += served.cost_usd
        self.top_usd += top_usd


async def simulate(
    settings: Settings, scenario: Scenario, plan: SimulationPlan, report: Report = lambda text, done: None
) -> list[SimulationInterval]:
    """Run a scenario on a database of its own.

    Parameters
    ----------
    settings : of the gateway; see :func:`gateway.commands.simulate.simulation_settings`
    report : told what is being done, and the part of the whole
    """
    clock, world = SimulatedClock(), TrafficGenerator(Accuracy.load(), plan.seed)
    stretches: list[SimulationInterval] = []
    async with open_gateway(settings, clock, plan.seed) as stage:
        num_looks = plan.weeks * plan.looks_per_week
        seen = _EventTracker()
        for look in range(num_looks):
            stage.set_conditions(scenario.at(look / num_looks))
            stretch = SimulationInterval((look + 1) / plan.looks_per_week)
            before_usd = await _spent_on_checks(stage)
            await _traffic(stage, world, plan, look, stretch)
            stretch.checks_usd = await _spent_on_checks(stage) - before_usd
            await stage.look()
            is_weekly = (look + 1) % plan.looks_per_week == 0
            outcome = await stage.retrain_if_asked(is_weekly=is_weekly)
            if outcome is not None:
                stretch.events.append(f"retrain {outcome.status}: {outcome.reason}")
            stretch.events += await seen.news(stage)
            stretch.router_version = stage.control.routers.version
            stretch.num_tightened = len(stage.control.state.quarantines)
            stretches.append(stretch)
            report(f"week {stretch.week:.1f}", (look + 1) / num_looks)
    return stretches


async def _traffic(
    stage: SimulatedGateway, world: TrafficGenerator, plan: SimulationPlan, look: int, stretch: SimulationInterval
) -> None:
    """The requests of one stretch, an hour at a time, and the checks that follow them."""
    num_hours = plan.looks_per_week * plan.hours_per_look
    top_usd = stage.top_price_usd
    for hour in range(look * plan.hours_per_look, (look + 1) * plan.hours_per_look):
        count = (hour + 1) * plan.requests_per_week // num_hours - hour * plan.requests_per_week // num_hours
        for start in range(0, count, _AT_ONCE):
            asked = [world.ask(stage.conditions) for _ in range(min(_AT_ONCE, count - start))]
            for served in await asyncio.gather(*(stage.serve(each) for each in asked)):
                stretch.add(served, top_usd)
            await stage.control.shadow.settle()
        # The hour's checks come before its end, so that no hour's budget pays for two.
        stage.clock.advance(0.98 * WEEK_S / num_hours)
        stretch.num_checks += await stage.work()
        stage.clock.advance(0.02 * WEEK_S / num_hours)


async def _spent_on_checks(stage: SimulatedGateway) -> Decimal:
    return (await stage.queue.spent_since(stage.began_at)).cost_usd


class _EventTracker:
    """Remembers which alerts and routers were there, to tell what is new."""

    def __init__(self) -> None:
        self._alerts: set[str] = set()
        self._router = ""
        self._canary: tuple[str, str, float] | None = None

    async def news(self, stage: SimulatedGateway) -> list[str]:
        """Return what is new since the last time, in words."""
        found = []
        for alert in await stage.control.store.list_alerts():
            if alert.alert_id not in self._alerts:
                self._alerts.add(alert.alert_id)
                found.append(f"alert {alert.kind}: {alert.subject}")
        state = stage.control.state.router
        canary = state.canary and (state.canary.version, state.canary.stage, state.canary.share)
        if canary and canary != self._canary:
            found.append(f"rollout {canary[0][:8]}: {canary[1]} at {canary[2]:.0%}")
        self._canary = canary
        version = stage.control.routers.version
        if self._router and version != self._router:
            found.append(f"router {version[:8]} serves")
        self._router = version
        return found


def summary(
    scenario: Scenario, plan: SimulationPlan, stretches: Sequence[SimulationInterval], floor: float
) -> dict[str, Any]:
    """Summarise a run: quality and cost before, at worst and at the end; when it was noticed and healed."""
    change = scenario.starts_at * plan.weeks
    last = stretches[-plan.looks_per_week :]
    calm = [each for each in stretches if each.week <= change] or stretches[:1]
    after = [each for each in stretches if each.week > change]
    alarms = [each.week for each in stretches for e in each.events if "alert drift" in e or "alert floor" in e]
    is_calm = scenario.after == scenario.before
    due = [] if is_calm else [week for week in alarms if week > change]
    rolling = _rolling(stretches, plan.looks_per_week // 2, floor)
    below = [each for each in rolling if each.week > change and each.is_below]
    healed = _healed(rolling, change)
    checks, spent = sum(each.checks_usd for each in stretches), sum(each.spent_usd for each in stretches)
    return {
        "scenario": scenario.name,
        "weeks": plan.weeks,
        "requests": sum(each.num_requests for each in stretches),
        "seed": plan.seed,
        "floor": floor,
        "quality_before": _quality(calm),
        "quality_after_change": _quality(after),
        "quality_last_week": _quality(last),
        "lowest_rolling_quality": min(each.quality for each in rolling),
        "weeks_below_floor": len(below) / plan.looks_per_week,
        "changed_at_week": change,
        "first_alarm_after_weeks": round(due[0] - change, 3) if due else None,
        "false_alarms": len(alarms) - len(due),
        "tenant_alerts": sorted({e for each in stretches for e in each.events if "alert tenant" in e}),
        "healed_after_weeks": None if healed is None else round(healed - change, 3),
        "retrains": [e for each in stretches for e in each.events if e.startswith("retrain")],
        "cost_before": _cost(calm),
        "cost_last_week": _cost(last),
        "checks_share_of_cost": float(checks / spent) if spent else 0.0,
        "num_checks": sum(each.num_checks for each in stretches),
    }


@dataclass(frozen=True, slots=True)
class _QualityWindow:
    """Quality over some stretches; ``is_below`` when it is lower than the floor by more than chance explains."""

    week: float
    quality: float
    is_below: bool


def _rolling(stretches: Sequence[SimulationInterval], width: int, floor: float) -> list[_QualityWindow]:
    windows = []
    for end in range(width, len(stretches) + 1):
        part = stretches[end - width : end]
        quality, count = _quality(part), sum(each.num_top_right for each in part)
        error = (floor * (1.0 - floor) / max(count, 1)) ** 0.5
        windows.append(_QualityWindow(part[-1].week, quality, quality < floor - _SURE * error))
    return windows


def _healed(rolling: Sequence[_QualityWindow], change: float) -> float | None:
    """Return the week from which on quality is not below the floor any more; the change itself where it never fell."""
    after = [each for each in rolling if each.week > change]
    last_below = max((each.week for each in after if each.is_below), default=None)
    if last_below is None:
        return change
    return next((each.week for each in after if each.week > last_below), None)


def _quality(stretches: Sequence[SimulationInterval]) -> float:
    top = sum(each.num_top_right for each in stretches)
    return round(sum(each.num_right for each in stretches) / top, 4) if top else 1.0


def _cost(stretches: Sequence[SimulationInterval]) -> float:
    """Of serving all by the top tier."""
    top = sum(each.top_usd for each in stretches)
    return round(float(sum(each.spent_usd for each in stretches) / top), 4) if top else 0.0
