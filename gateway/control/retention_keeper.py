"""Enforces retention by itself: a job of the leader, in small transactions beside the traffic.

Without settings it deletes nothing of the log. Shadow decisions are no part of that: a rollout reads none that is older
than the monitor's window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select

from gateway.config.sections import LogConfig
from gateway.store.control_records import Lease
from gateway.store.pruning import LogPruner
from gateway.store.store import Store
from gateway.store.tables import verifications

_log = logging.getLogger("suffice.retention")

# What lies this long before the end of the last pass is looked at again: rows are committed late, clocks differ.
_OVERLAP = timedelta(days=1)


class RetentionKeeper:
    """Deletes what is older than the settings say.

    Parameters
    ----------
    store : the open database
    config : how long what is kept
    window_days : of shadow decisions
    clock : wall clock, aware
    """

    def __init__(
        self,
        store: Store,
        config: LogConfig,
        window_days: float,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._pruner = LogPruner(store)
        self._config = config
        self._window = timedelta(days=window_days)
        self._clock = clock
        self._texts_until: datetime | None = None
        self._last_forgotten: Any = None
        self._is_unscrubbed = False

    async def prune(self, lease: Lease) -> None:
        """Delete what is due.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        config, pruner, now = self._config, self._pruner, self._clock()
        deleted = {"shadow_decisions": await pruner.shadow_decisions(now - self._window)}
        if config.texts_days is not None:
            before = now - timedelta(days=config.texts_days)
            after = None if self._texts_until is None else self._texts_until - _OVERLAP
            deleted["texts"] = await pruner.texts(before, after)
            self._texts_until = before
        if config.responses_days is not None:
            deleted["responses"] = await pruner.responses(now - timedelta(days=config.responses_days))
        if config.rows_days is not None:
            deleted["rows"] = await pruner.rows(now - timedelta(days=config.rows_days))
        if config.sessions_days is not None:
            deleted["sessions"] = await pruner.sessions(now - timedelta(days=config.sessions_days))
        if config.history_days is not None:
            deleted |= await pruner.history(now - timedelta(days=config.history_days))
        if any(deleted.values()):
            self._is_unscrubbed = True
            shown = ", ".join(f"{num} {name}" for name, num in deleted.items() if num)
            _log.info("forgotten by age: %s", shown)
            await self.scrub(lease)

    async def scrub(self, lease: Lease) -> None:
        """Make texts that were deleted since the last time unreadable in the database's files.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        if self._store.dialect != "sqlite":
            return
        async with self._store.transaction() as connection:
            last_ended = (await connection.execute(select(func.max(verifications.c.finished_at)))).scalar()
        forgotten = (last_ended, self._store.num_forgotten)
        if self._is_unscrubbed or forgotten != self._last_forgotten:
            self._is_unscrubbed = not await self._store.scrub()
            self._last_forgotten = forgotten
