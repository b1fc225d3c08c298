"""Assigns the leader its jobs: the monitor's look, the rollout's step, retention, and daily sums."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gateway.control.control_plane import ControlPlane
from gateway.control.quality_monitor import QualityMonitor
from gateway.control.retention_keeper import RetentionKeeper
from gateway.control.rollout_driver import RolloutDriver
from gateway.control.watch_health import WatchHealth
from gateway.store.control_records import Lease
from gateway.store.monitoring import MonitorReader
from gateway.store.rollups import DayFolder
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.config.settings import Settings


_PRUNE_EVERY_S = 600.0
_SCRUB_EVERY_S = 60.0
_FOLD_EVERY_S = 60.0
_DAYS_AT_ONCE = 60


def assign_leader_jobs(plane: ControlPlane, settings: Settings, store: Store) -> tuple[QualityMonitor, WatchHealth]:
    """Return the monitor, for reports, and its health; it and the rollout's driver run on whichever server leads."""
    reader = MonitorReader(store)
    monitor = QualityMonitor(plane, reader, settings.monitor)
    driver = RolloutDriver(plane, reader, settings.control, settings.monitor)
    health = WatchHealth(plane, monitor)
    if settings.monitor.enabled:
        plane.leader.every(settings.monitor.every_s, "monitor", health.look)
    plane.leader.every(settings.control.rollout_every_s, "rollout", driver.step)
    keeper = RetentionKeeper(store, settings.log, settings.monitor.window_days)
    plane.leader.every(_PRUNE_EVERY_S, "retention", keeper.prune)
    plane.leader.every(_SCRUB_EVERY_S, "scrub", keeper.scrub)
    plane.leader.every(_FOLD_EVERY_S, "rollups", partial(_fold_days, DayFolder(store)))
    return monitor, health


async def _fold_days(folder: DayFolder, lease: Lease) -> None:
    """Sum up what is due; the rest of a long log at the next turns."""
    for _ in range(_DAYS_AT_ONCE):
        if await folder.fold_next() is None:
            return
