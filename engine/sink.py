"""Hands a request's events back to the thread, or the event loop, that asked."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from engine.request import Event


class Sink(Protocol):
    """Receives one request's events in order, the ending last.

    ``put`` runs on the event loop ``loop`` if there is one, else on the engine's thread, where it must not block.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def put(self, event: Event) -> None: ...


class QueueSink:
    """Serves a caller that blocks in a thread of its own."""

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._events.put(event)

    def get(self, timeout_s: float | None = None) -> Event:
        """Return the next event; raises ``queue.Empty`` after ``timeout_s``."""
        return self._events.get(timeout=timeout_s)


class AsyncSink:
    """Serves a coroutine; create it on the loop that will read it."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Event:
        """Return the next event, waiting for it if need be. One reader at a time."""
        while not self._events:
            assert self.loop is not None
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    def get_nowait(self) -> Event | None:
        """Return the next event, or None while there is none."""
        return self._events.popleft() if self._events else None


def deliver(events: Iterable[tuple[Sink, Event]]) -> list[Sink]:
    """Hand a step's events over, waking each event loop once.

    Returns
    -------
    Sinks whose event loop is gone, so that their requests can be cancelled
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Sink, Event]]] = {}
    for sink, event in events:
        if sink.loop is None:
            sink.put(event)
        else:
            by_loop.setdefault(sink.loop, []).append((sink, event))
    lost: list[Sink] = []
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            lost += [sink for sink, _ in batch]
    return lost


def _put_all(batch: list[tuple[Sink, Event]]) -> None:
    for sink, event in batch:
        sink.put(event)
