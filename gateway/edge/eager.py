"""Awaiting without waiting: run an awaitable up to its first real wait, and only then decide how to go on.

Two things rest on it. A body that has arrived with its head is read without a timer. And tokens that are already there
are taken together before the client is written to, so that a busy loop writes seldom instead of falling behind.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Eager(Generic[T]):
    """An awaitable, begun. Either ``is_done`` and ``result`` is there, or ``rest`` must be awaited (or ``abandon``)."""

    __slots__ = ("_running", "_yielded", "is_done", "result")

    def __init__(self, awaitable: Awaitable[T]) -> None:
        # Coroutines and an async generator's steps are driven by send(); what else can be awaited is asked for that.
        self._running: Any = awaitable if hasattr(awaitable, "send") else awaitable.__await__()
        self.is_done = False
        self.result: T | None = None
        self._yielded: Any = None
        try:
            self._yielded = self._running.send(None)
        except StopIteration as end:
            self.is_done = True
            self.result = end.value

    async def rest(self) -> T:
        """Wait for what was begun."""
        return cast("T", await _drive(self._running, self._yielded))

    async def abandon(self) -> None:
        """Cancel what was begun, if it still runs, and let it clean up."""
        if self.is_done:
            return
        try:
            yielded = self._running.throw(asyncio.CancelledError())
        except (StopIteration, StopAsyncIteration, asyncio.CancelledError):
            return
        with suppress(StopAsyncIteration, asyncio.CancelledError):
            await _drive(self._running, yielded)


@types.coroutine
def _drive(running: Any, yielded: Any) -> Generator[Any, Any, Any]:
    """Hand what ``running`` waits for to the event loop, and the loop's answers to ``running``, until it ends."""
    try:
        while True:
            try:
                answer = yield yielded
            except BaseException as error:
                yielded = running.throw(error)
            else:
                yielded = running.send(answer)
    except StopIteration as end:
        return end.value
