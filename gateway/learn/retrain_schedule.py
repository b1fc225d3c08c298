"""Schedules the leader's retrains: by the week, and when the monitor, an administrator or a command has asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from gateway.control.control_writer import ControlWriter
from gateway.control.leader import Leader
from gateway.learn.retrain_process import retrain_in_child
from gateway.learn.run_store import RunStore
from gateway.store.control_records import Lease
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_log = logging.getLogger("suffice.learn")


class RetrainSchedule:
    """Starts retrains in a child process while this server leads; one at a time in the whole installation.

    Parameters
    ----------
    settings : checked configuration
    store : the open database
    writer : asks for the weekly run
    clock : wall clock, aware
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        writer: ControlWriter,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._runs = RunStore(store)
        self._writer = writer
        self._clock = clock
        self._started_at = clock()
        self._child: asyncio.Task[int] | None = None

    def join(self, leader: Leader) -> None:
        """Become a job of the leader, before it starts."""
        if self._settings.learning.enabled:
            leader.every(self._settings.learning.look_every_s, "retraining", self.look)

    async def close(self) -> None:
        """End a child that runs; its run is found abandoned by whoever leads next."""
        if self._child is not None:
            self._child.cancel()
            await asyncio.gather(self._child, return_exceptions=True)

    async def look(self, lease: Lease) -> None:
        """One look: mark what was abandoned, ask for the weekly run when it is due, start what is asked for."""
        for run_id in await self._runs.mark_abandoned(self._clock(), self._settings.learning.lease_s):
            _log.warning("retrain %s was abandoned: its process is no more", run_id)
        if self._child is not None and not self._child.done():
            return
        if await self._is_due() and not await self._runs.is_any_open():
            await self._writer.request_retrain("weekly", f"every {self._settings.learning.every_days:g} days")
        run = await self._runs.next_requested()
        if run is not None:
            _log.info("retrain %s begins (%s: %s)", run.run_id, run.trigger, run.reason)
            self._child = asyncio.create_task(
                retrain_in_child(self._settings, run.run_id, run.trigger), name="suffice-retrain"
            )

    async def _is_due(self) -> bool:
        """Return whether the last run was long enough ago; before the first one the installation's age counts."""
        every = timedelta(days=self._settings.learning.every_days)
        last = await self._runs.newest_end() or await self._runs.installed_at() or self._started_at
        return every > timedelta(0) and self._clock() - last >= every
