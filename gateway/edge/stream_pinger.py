"""Keeps a silent stream alive, for clients and proxies that give up on a connection from which nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gateway.edge.responder import Headers, Responder


class StreamPinger:
    """Sends something that clients skip whenever nothing was sent for so long.

    The first ping of a stream that has not begun sends its head: from then on an error is the stream's last event.
    One timer and, while a ping is sent, one task.

    Parameters
    ----------
    every_s : seconds of silence
    ping : what is sent
    headers : made for the head, where a ping is the first to be sent
    """

    __slots__ = ("_every_s", "_headers", "_loop", "_ping", "_responder", "_timer")

    def __init__(self, responder: Responder, every_s: float, ping: bytes, headers: Callable[[], Headers]) -> None:
        self._responder = responder
        self._every_s = every_s
        self._ping = ping
        self._headers = headers
        self._loop = responder.loop
        responder.sent_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(every_s, self._look)

    def stop(self) -> None:
        """Begin no further ping; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stop, and end a ping that its client does not take."""
        self.stop()
        if self._responder.pinging is not None:
            self._responder.pinging.cancel()

    def _look(self) -> None:
        responder = self._responder
        left_s = responder.sent_s + self._every_s - self._loop.time()
        if responder.is_sending:
            # A client that takes nothing needs no ping.
            left_s = self._every_s
        if left_s <= 0:
            responder.pinging = self._loop.create_task(self._send(), name="suffice-ping")
            left_s = self._every_s
        self._timer = self._loop.call_later(left_s, self._look)

    async def _send(self) -> None:
        # Whatever is wrong with the connection, the request's own task hears of it.
        with suppress(Exception):
            await self._responder.ping(self._ping, self._headers)
