"""How a response is written: its head together with the first bytes of its body, and without chunks to HTTP/1.0.

uvicorn writes a head by itself, which is a system call more for every response, and looks at each of its dozen headers
with two regular expressions. What is unusual is left to it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_NAME = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
# Names that were looked at and are good: those of our own responses, which are few.
_good_names: set[bytes] = set()
_MOST_NAMES = 1024
# They change how the body is written.
_UNUSUAL_NAMES = frozenset({b"connection", b"transfer-encoding"})
_BODILESS = frozenset({*range(100, 200), 204, 304})
_CONTROLS = bytes([*range(9), *range(10, 32), 127])


class OneWriteCycle(RequestResponseCycle):
    """Holds a head back until the first bytes of its body, and that of a stream for one turn of the event loop."""

    _head = b""
    _is_ours = False
    """It wrote, or holds, the head; else uvicorn did, and goes on alone."""

    def send(self, message: Any) -> Coroutine[Any, Any, None]:
        """Send a part of the response."""
        if self.flow.write_paused or self.disconnected:
            self._write_head()
        elif not self.response_started:
            if message["type"] == "http.response.start" and self._hold_head(message):
                return _sent()
        elif self._is_ours and self._write_body(message):
            return _sent()
        return super().send(message)

    def _hold_head(self, message: Any) -> bool:
        """Keep a head for later; False where uvicorn is to look at it and write it."""
        status, headers = message["status"], [*self.default_headers, *message.get("headers", ())]
        values = dict(headers)
        if status in _BODILESS or self.scope["method"] == "HEAD" or not _UNUSUAL_NAMES.isdisjoint(values):
            return False
        if not (values.keys() <= _good_names or _are_good(values)):
            return False
        length = values.get(b"content-length")
        lines = [b"%b: %b\r\n" % header for header in headers]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if length is None:
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        # A value with a line break in it would make a header of its own.
        if len(head) - len(head.translate(None, _CONTROLS)) != len(b"\r\n") * len(lines):
            return False
        self._is_ours = self.response_started = True
        self.waiting_for_100_continue = False
        self.chunked_encoding, self.expected_content_length = length is None, int(length or 0)
        self._head = STATUS_LINE[status] + head + b"\r\n"
        if length is None:
            asyncio.get_running_loop().call_soon(self._write_head)
        return True

    def _write_body(self, message: Any) -> bool:
        """Write the next bytes, and before them the head where it is held; False where uvicorn is to write them."""
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if message["type"] == "http.response.body" and not self.response_complete:
            if self.chunked_encoding and body and not is_last:
                head, self._head = self._head, b""
                self.transport.write(b"%b%x\r\n%b\r\n" % (head, len(body), body))
                return True
            if self._head and is_last and len(body) == self.expected_content_length and not self.chunked_encoding:
                self._write_whole(body)
                return True
        self._write_head()
        return False

    def _write_whole(self, body: bytes) -> None:
        head, self._head = self._head, b""
        self.expected_content_length, self.response_complete = 0, True
        self.transport.write(head + body)
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _write_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self.disconnected:
            self.transport.write(head)


class UnchunkedCycle(RequestResponseCycle):
    """Answers a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with its connection."""

    _is_unbounded = False

    async def send(self, message: Any) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self._is_unbounded = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._is_unbounded:
                self.chunked_encoding = False
        elif self._is_unbounded:
            # uvicorn holds what comes against what was announced.
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


async def _sent() -> None:
    """Nothing is left to be waited for."""


def _are_good(names: dict[bytes, bytes]) -> bool:
    """Return whether all are names of headers, in lower case; remember them."""
    if not all(_NAME.fullmatch(name) for name in names):
        return False
    if len(_good_names) + len(names) <= _MOST_NAMES:
        _good_names.update(names)
    return True
