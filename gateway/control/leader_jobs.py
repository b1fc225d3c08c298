"""Assigns the leader its jobs: the monitor's look and the rollout's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.control.control_plane import ControlPlane
from gateway.control.quality_monitor import QualityMonitor
from gateway.control.rollout_driver import RolloutDriver
from gateway.store.monitoring import MonitorReader
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.config.settings import Settings


def assign_leader_jobs(plane: ControlPlane, settings: Settings, store: Store) -> QualityMonitor:
    """Return the monitor, for reports; it and the rollout's driver run on whichever server leads."""
    reader = MonitorReader(store)
    monitor = QualityMonitor(plane, reader, settings.monitor)
    driver = RolloutDriver(plane, reader, settings.control, settings.monitor)
    if settings.monitor.enabled:
        plane.leader.every(settings.monitor.every_s, "monitor", monitor.look)
    plane.leader.every(settings.control.rollout_every_s, "rollout", driver.step)
    return monitor
