"""The sending half of one response: what was sent so far decides how an error is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from gateway import sse
from gateway.errors import ErrorAnswer
from gateway.lifeline import Lifeline

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Responder:
    """Wraps ASGI's ``send``. ``status`` is None before the first byte."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.is_complete = False

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response."""
        self.status = status
        self.is_complete = True
        length = (b"content-length", b"%d" % len(body))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response but for its end, so that the connection stays until ``finish``."""
        self.status = status
        self.is_complete = True
        length = (b"content-length", b"%d" % len(body))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self) -> None:
        """End what ``begin`` began."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def open_stream(self, headers: Headers) -> None:
        """Send the head of a stream of events."""
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS, *headers]})

    async def frames(self, frames: bytes, lifeline: Lifeline) -> None:
        """Send events; while the client does not take them the lifeline counts."""
        lifeline.sending()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        lifeline.sent()

    async def close_stream(self, frames: bytes) -> None:
        """Send the last events."""
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})

    async def error(self, answer: ErrorAnswer, headers: Headers) -> None:
        """Tell of an error: as JSON before the first byte, after it as one event.

        No ``[DONE]`` follows: what was cut off must not look complete.
        """
        if self.status is None:
            await self.whole(answer.status, [*answer.headers(), *headers], answer.json())
        elif not self.is_complete:
            await self.close_stream(sse.event(orjson.dumps(answer.body)))
