"""Elects the one server that runs the monitor, the rollouts and the schedule.

The leader renews a lease; one that dies or loses the database is followed by another once the lease has run out. It
counts its own time from before it asked, by a clock that no one sets, so it stops believing before others may begin.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.control.errors import ControlError
from gateway.ids import uuid7
from gateway.store.control_records import Lease
from gateway.store.errors import StoreError

_log = logging.getLogger("suffice.leader")

Job = Callable[[Lease], Awaitable[None]]
"""Work that only the leader does; it hands the lease to what it changes."""


class Leases(Protocol):
    """The part of the store that is needed here."""

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None: ...

    async def renew(self, lease: Lease, ttl_s: float) -> Lease | None: ...

    async def release(self, lease: Lease) -> None: ...


def make_holder() -> str:
    """Return a name for this process that no other has or had."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid7()}"


class Leader:
    """Stands for election as long as it runs.

    Parameters
    ----------
    leases : where the lease lies
    name : of the lease
    ttl_s : how long a leader that died is missed; renewed three times in that time
    clock : monotonic, seconds
    """

    def __init__(
        self, leases: Leases, name: str = "leader", *, ttl_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.holder = make_holder()
        self._leases = leases
        self._name = name
        self._ttl_s = ttl_s
        self._clock = clock
        self._lease: Lease | None = None
        self._until_s = float("-inf")
        self._jobs: list[tuple[str, float, Job]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def lease(self) -> Lease | None:
        """Return the lease while this process leads, else None."""
        return self._lease if self._clock() < self._until_s else None

    def every(self, period_s: float, name: str, job: Job) -> None:
        """Do a job again and again while leading. To be said before :meth:`start`."""
        self._jobs.append((name, period_s, job))

    def start(self) -> None:
        """Stand for election."""
        self._tasks = [asyncio.create_task(self._stand(), name="suffice-leader")]
        self._tasks += [asyncio.create_task(self._repeat(*each), name=f"suffice-{each[0]}") for each in self._jobs]

    async def close(self) -> None:
        """Stop, and let another lead at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                await self._leases.release(lease)
            except StoreError as problem:
                _log.info("the lease runs out by itself: %s", problem)

    async def _stand(self) -> None:
        while True:
            try:
                await self.campaign()
            except StoreError as problem:
                _log.warning("the lease could not be asked for: %s", problem)
            except Exception:
                _log.exception("asking for the lease failed")
            await asyncio.sleep(self._ttl_s / 3)

    async def campaign(self) -> bool:
        """Renew the lease or try to get it, once. True when this process leads."""
        asked_s = self._clock()
        held = self._lease
        if held is not None:
            found = await self._leases.renew(held, self._ttl_s)
        else:
            found = await self._leases.acquire(self._name, self.holder, self._ttl_s)
        if found is not None and (held is None or held.token != found.token):
            _log.info("this server leads (token %d)", found.token)
        if found is None and held is not None:
            _log.warning("this server leads no more: another took the lease")
        self._lease = found
        self._until_s = asked_s + self._ttl_s if found is not None else float("-inf")
        return found is not None

    async def _repeat(self, name: str, period_s: float, job: Job) -> None:
        while True:
            await asyncio.sleep(period_s)
            lease = self.lease
            if lease is None:
                continue
            try:
                await job(lease)
            except (StoreError, ControlError) as problem:
                _log.warning("%s: %s", name, problem)
            except Exception:
                # A job that breaks must not end the others, nor itself for ever.
                _log.exception("%s failed", name)
