"""The sending half of one response: what was sent so far decides how an error is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from gateway.api import sse
from gateway.edge.error_table import ErrorAnswer
from gateway.edge.watchdog import Watchdog
from gateway.errors import ClientStalled

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Responder:
    """Wraps ASGI's ``send``. ``status`` is None before the first byte.

    Parameters
    ----------
    send : the server's; it waits while the client takes nothing
    watchdog : bounds how long the client may take nothing
    """

    def __init__(self, send: Send, watchdog: Watchdog) -> None:
        self._send = send
        self._watchdog = watchdog
        self.status: int | None = None
        self.is_complete = False

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
        """Send the head of a stream of events."""
        await self._start(200, [*sse.HEADERS, *headers])

    async def frames(self, frames: bytes) -> None:
        """Send events."""
        self._watchdog.waiting()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        self._watchdog.served()

    async def close_stream(self, frames: bytes) -> None:
        """Send the last events.

        Raises
        ------
        ClientStalled
        """
        await self._finish(frames)

    async def error(self, answer: ErrorAnswer, headers: Headers) -> None:
        """Tell of an error: as JSON before the first byte, after it as one event.

        No ``[DONE]`` follows: what was cut off must not look complete.
        """
        try:
            if self.status is None:
                await self.whole(answer.status, [*answer.headers(), *headers], answer.json())
            elif not self.is_complete:
                await self._finish(sse.event(orjson.dumps(answer.body)))
        except ClientStalled:
            # Nobody reads it; the connection is closed when the request returns.
            return

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _finish(self, body: bytes) -> None:
        self.is_complete = True
        with self._watchdog.closing():
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
