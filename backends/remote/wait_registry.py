"""Registers bounded waits, so that all can be ended at once when the backend closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class BackendClosed(Exception):
    """The backend was closed while something waited."""


class WaitRegistry:
    """Holds every wait that is going on. One event loop."""

    def __init__(self) -> None:
        self.is_closed = False
        self._active: set[asyncio.Timeout] = set()

    async def bounded(self, awaitable: Awaitable[T], limit_s: float) -> T:
        """Await something for at most ``limit_s`` seconds.

        Raises
        ------
        TimeoutError : the time passed
        BackendClosed : :meth:`close` was called before it did
        """
        timeout = asyncio.timeout(max(0.0, limit_s))
        self._active.add(timeout)
        try:
            async with timeout:
                return await awaitable
        except TimeoutError:
            if self.is_closed:
                raise BackendClosed from None
            raise
        finally:
            self._active.discard(timeout)

    def close(self) -> None:
        """End every wait now. Idempotent."""
        self.is_closed = True
        for timeout in self._active:
            if not timeout.expired():
                timeout.reschedule(0.0)
