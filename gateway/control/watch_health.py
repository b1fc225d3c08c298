"""Knows whether the monitor can look: a watch that cannot must not be silent about it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime

from gateway.control.control_plane import ControlPlane
from gateway.control.quality_monitor import QualityMonitor
from gateway.store.control_records import Lease
from gateway.store.errors import StoreError

_KIND, _LOOK, _TENANTS = "monitor", "look", "tenants"
# Looks in a row that fail before a person is told.
_MOST_FAILED = 3
_MOST_BEHIND_S = 600.0


class WatchHealth:
    """Looks with the monitor, counts what fails, and raises an alert while it goes on.

    Parameters
    ----------
    clock : monotonic, seconds

    Attributes
    ----------
    num_failed : looks in a row that failed on this server
    """

    def __init__(
        self, plane: ControlPlane, monitor: QualityMonitor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plane = plane
        self._monitor = monitor
        self._clock = clock
        self._ended_s: float | None = None
        # An alert may be open from before this process; so the first good look closes it.
        self._alerted: set[str] = {_LOOK, _TENANTS}
        self.num_failed = 0

    @property
    def age_s(self) -> float:
        """Return the seconds since a look ended well here; 0 before the first, and on a server that does not lead."""
        if self._ended_s is None or self._plane.leader.lease is None:
            return 0.0
        return self._clock() - self._ended_s

    @property
    def behind_s(self) -> float:
        """Return how late the tenants' watch reads, while it cannot keep up."""
        return self._monitor.tenants_behind_s

    async def look(self, lease: Lease) -> None:
        """Look once.

        Raises
        ------
        Whatever the look raises.
        """
        try:
            await self._monitor.look(lease)
        except Exception as problem:
            self.num_failed += 1
            if self.num_failed >= _MOST_FAILED:
                await self._say(_LOOK, f"{self.num_failed} looks in a row failed: {problem}")
            raise
        self.num_failed, self._ended_s = 0, self._clock()
        await self._say(_LOOK, "")
        late = f"decisions are read {self.behind_s:.0f} s late" if self.behind_s > _MOST_BEHIND_S else ""
        await self._say(_TENANTS, late)

    async def _say(self, subject: str, problem: str) -> None:
        """Raise an alert, or close it where there is no problem; a database that is down hears neither."""
        now = datetime.now(UTC)
        with contextlib.suppress(StoreError):
            if problem:
                await self._plane.alert(_KIND, "critical", subject, {"problem": problem}, now)
                self._alerted.add(subject)
            elif subject in self._alerted:
                await self._plane.store.resolve_alerts(_KIND, subject, now)
                self._alerted.discard(subject)
