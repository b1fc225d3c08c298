"""The sending half of one response: what was sent so far decides how an error is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

from gateway.api import sse
from gateway.edge.error_table import ErrorAnswer
from gateway.edge.watchdog import Watchdog
from gateway.errors import ClientStalled

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Responder:
    """Wraps ASGI's ``send``. ``status`` is None before the first byte; ``encode_error`` makes a broken stream's end.

    Parameters
    ----------
    send : the server's; it waits while the client takes nothing
    watchdog : bounds how long the client may take nothing

    Attributes
    ----------
    loop : of the request
    sent_s, is_sending : when something was sent last, by the loop's clock; whether events are on their way
    pinging : sends a ping, which all else waits for; see :class:`gateway.edge.stream_pinger.StreamPinger`
    """

    def __init__(self, send: Send, watchdog: Watchdog) -> None:
        self._send = send
        self._watchdog = watchdog
        self.loop = watchdog.loop
        self.status: int | None = None
        self.is_complete = False
        self.sent_s = 0.0
        self.is_sending = False
        self.pinging: asyncio.Task[None] | None = None
        self.encode_error: Callable[[Mapping[str, Any]], bytes] = sse.error

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response.

        Raises
        ------
        ClientStalled
        """
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._finish(body)

    async def begin(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response but for its end, so that the connection stays until ``finish``."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self) -> None:
        """End what ``begin`` began."""
        await self._finish(b"")

    async def open_stream(self, headers: Headers) -> None:
        """Send the head of a stream of events, unless a ping has done so."""
        if self.pinging is not None:
            await asyncio.wait([self.pinging])
        if self.status is None:
            await self._start(200, [*sse.HEADERS, *headers])

    def frames(self, frames: bytes) -> Coroutine[Any, Any, None]:
        """Send events."""
        return self._frames(frames) if self.pinging is None else self._frames_after(self.pinging, frames)

    async def _frames_after(self, pinging: asyncio.Task[None], frames: bytes) -> None:
        await asyncio.wait([pinging])
        await self._frames(frames)

    async def ping(self, frames: bytes, headers: Callable[[], Headers]) -> None:
        """Send what a silent stream is kept alive by; in a task of its own, ``pinging``."""
        try:
            if self.status is None:
                await self._start(200, [*sse.HEADERS, *headers()])
            await self._frames(frames)
        finally:
            self.pinging = None

    async def _frames(self, frames: bytes) -> None:
        self._watchdog.waiting()
        self.is_sending = True
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        self.is_sending = False
        self._watchdog.served()
        if frames:
            self.sent_s = self.loop.time()

    async def close_stream(self, frames: bytes) -> None:
        """Send the last events.

        Raises
        ------
        ClientStalled
        """
        await self._finish(frames)

    async def error(self, answer: ErrorAnswer, headers: Headers) -> None:
        """Tell of an error: as JSON before the first byte, after it as the protocol's last event."""
        try:
            await self._after_ping()
            if self.status is None:
                await self.whole(answer.status, [*answer.headers(), *headers], answer.json())
            elif not self.is_complete:
                await self._finish(self.encode_error(answer.body["error"]))
        except ClientStalled:
            # Nobody reads it; the connection is closed when the request returns.
            return

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        # Only now: a ping may be ended while it waits to send it.
        self.status = status

    async def _after_ping(self) -> None:
        if self.pinging is not None:
            with self._watchdog.closing():
                await asyncio.wait([self.pinging])

    async def _finish(self, body: bytes) -> None:
        if self.pinging is not None:
            await self._after_ping()
        self.is_complete = True
        with self._watchdog.closing():
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
