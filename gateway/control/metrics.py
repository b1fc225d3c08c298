"""Metrics of the control plane for ``/metrics``; read when asked for."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.access.spending_lease import SpendingLease
from gateway.control.control_plane import ControlPlane
from gateway.control.control_state import stored_least
from gateway.control.spending_watch import SpendingWatch
from gateway.control.watch_health import WatchHealth
from policies.pricing import from_nano_usd


class ControlMetrics(Collector):
    """Collects one server's view of the active control state."""

    def __init__(self, plane: ControlPlane, health: WatchHealth) -> None:
        self._plane = plane
        self._health = health

    def collect(self) -> Iterable[Metric]:
        plane, state = self._plane, self._plane.state
        canary = state.router.canary
        redis = plane.status()["redis"]
        for name, help_text, value in (
            ("suffice_control_generation", "Number of the change that is in force here.", state.generation),
            ("suffice_control_age_seconds", "Since the database last said what is in force.", plane.seconds_since_seen),
            ("suffice_control_problem", "1 while something that is to be in force cannot be.", bool(plane.problem)),
            ("suffice_control_redis", "1 while Redis is heard; 0 also without Redis.", bool(redis)),
            ("suffice_kill_switch", "1 while all traffic goes to the top tier.", state.kill_switch.on),
            ("suffice_leader", "1 while this server leads.", plane.leader.lease is not None),
            ("suffice_monitor_failures", "Looks of the monitor in a row that failed here.", self._health.num_failed),
            ("suffice_monitor_age_seconds", "Since a look of the monitor ended well here.", self._health.age_s),
            ("suffice_monitor_behind_seconds", "How late the tenants' watch reads.", self._health.behind_s),
            ("suffice_rollout_share", "Share of sticky keys a new router serves.", canary.share if canary else 0.0),
            ("suffice_shadow_left_out", "Requests a router on its way had no time for.", plane.shadow.num_left_out),
        ):
            yield GaugeMetricFamily(name, help_text, float(value))
        groups = GaugeMetricFamily(
            "suffice_tightened_groups", "Tenants and domains in doubt by themselves.", labels=["policy"]
        )
        for name in plane.policies:
            groups.add_metric([name], len(state.group_quarantine(name, state.router.active)))
        yield groups
        quarantine = GaugeMetricFamily(
            "suffice_tightened_threshold",
            "P(as good) a tier in doubt must reach; 2 is closed.",
            labels=["policy", "tier"],
        )
        for name in plane.policies:
            for tier, asked in state.quarantine(name, state.router.active).items():
                quarantine.add_metric([name, str(tier)], stored_least(asked.least))
        yield quarantine


class SpendingMetrics(Collector):
    """Collects what this server's spending lease covers, and what it reported of dead processes."""

    def __init__(self, watch: SpendingWatch, lease: SpendingLease | None) -> None:
        self._watch = watch
        self._lease = lease

    def collect(self) -> Iterable[Metric]:
        watch, lease = self._watch, self._lease
        yield CounterMetricFamily(
            "suffice_unlogged_spending_usd",
            "Most that dead processes spent without a row, as reported here.",
            float(from_nano_usd(watch.unlogged_nano_usd)),
        )
        yield CounterMetricFamily(
            "suffice_spending_leases_reported", "Leases of dead processes reported here.", float(watch.num_reported)
        )
        held, amount, num_writes = (0, 0, 0)
        if lease is not None:
            held, amount, num_writes = lease.held_nano_usd, lease.amount_nano_usd, lease.num_writes
        for name, help_text, nano_usd in (
            ("suffice_spending_held_usd", "Most that calls under way to priced remote models may cost.", held),
            ("suffice_spending_lease_usd", "Durable amount that covers them.", amount),
        ):
            yield GaugeMetricFamily(name, help_text, float(from_nano_usd(nano_usd)))
        yield CounterMetricFamily("suffice_spending_lease_writes", "Writes of the spending lease.", float(num_writes))
