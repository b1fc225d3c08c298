"""Metrics of the control plane for ``/metrics``; read when asked for."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.control.control_plane import ControlPlane
from gateway.control.control_state import stored_least


class ControlMetrics(Collector):
    """Collects one server's view of the active control state."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

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
