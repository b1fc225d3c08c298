"""A client that can misbehave: raw sockets under asyncio, for hanging up, stalling and sending by drops."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

# How long a test waits for what must come. Only a broken product lets it pass, so that it says nothing of the machine's
# speed: a busy one takes seconds for what an idle one does in milliseconds.
PATIENCE_S = 60.0


class RawClient:
    """One connection. ``async with`` closes it."""

    def __init__(self, url: str, *, receive_buffer_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._address = (parts.hostname, parts.port or 80)
        self._buffer_bytes = receive_buffer_bytes

    async def __aenter__(self) -> RawClient:
        raw = socket.socket()
        raw.setblocking(False)
        if self._buffer_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        await asyncio.get_running_loop().sock_connect(raw, self._address)
        limit = self._buffer_bytes or 2**16
        self.reader, self.writer = await asyncio.open_connection(sock=raw, limit=limit)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def post(self, path: str, body: Any, *, headers: str = "", send: int | None = None) -> None:
        """Send a POST; with ``send`` only that many bytes of its body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
        self.writer.write(head.encode() + content[:send])
        await self.writer.drain()

    async def read_until(self, mark: bytes) -> bytes:
        """Read up to and including ``mark``, however long that is."""
        found = b""
        while mark not in found:
            piece = await self.reader.read(1024)
            assert piece, f"closed before {mark!r}: {found[-200:]!r}"
            found += piece
        return found

    def pause_reading(self) -> None:
        """Take nothing more from the kernel."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Vanish: the peer gets a reset, not an orderly end."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def until_refused(url: str) -> None:
    """Wait until a server takes no new connection."""
    parts = urlsplit(url)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.005)


async def eventually(holds: Any, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds; the assertion fails with the condition's own name."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"{holds} does not come true"
        await asyncio.sleep(0.005)
