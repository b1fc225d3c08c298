"""Holds one request at the provider server, and the ways to answer it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from backends.protocol import GenerateRequest
from backends.testing import Script
from tests.backends.provider.openai_codec import answer_chunks, parse_request, whole_answer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Connections(Protocol):
    """Stands for whoever knows the open connections, as uvicorn's protocol objects."""

    def connections(self) -> Iterable[Any]: ...


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """Holds one request as it arrived: behaviour, the path after it, headers (lower case) and the JSON body."""

    behaviour: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(slots=True)
class ProviderCall:
    """Holds one request being answered. ``num_seen`` counts this behaviour's requests, this one included."""

    scope: Scope
    receive: Receive
    send: Send
    seen: RecordedRequest
    script: Script
    num_seen: int
    server: Connections

    @property
    def is_chat(self) -> bool:
        return self.seen.path.endswith("/chat/completions")

    @property
    def request(self) -> GenerateRequest:
        return parse_request(self.seen.body)

    @property
    def wants_usage(self) -> bool:
        return bool((self.seen.body.get("stream_options") or {}).get("include_usage"))

    def chunks(self, **changes: Any) -> list[dict[str, Any]]:
        """Return the chunks of a good streamed answer: role, tokens, finish reason, usage when asked for."""
        options = {"with_usage": self.wants_usage, **changes}
        return answer_chunks(self.request, self.script, self.seen.body, is_chat=self.is_chat, **options)

    async def json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        """Answer with JSON, whole."""
        await self.whole(status, orjson.dumps(body), {"content-type": "application/json", **(headers or {})})

    async def error(self, status: int, message: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        """Answer with an error object."""
        await self.json(status, {"error": {"message": message, "type": "provider_error", **fields}}, headers)

    async def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        await self.start(status, headers)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def start(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send the head of an answer, by default that of an event stream."""
        pairs = [(k.encode(), v.encode()) for k, v in (headers or {"content-type": "text/event-stream"}).items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def answer_whole(self) -> None:
        """Answer without streaming."""
        await self.json(200, whole_answer(self.request, self.script, self.seen.body, is_chat=self.is_chat))

    async def write(self, data: bytes) -> None:
        """Send bytes of the body in a network write of their own."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})
        # Two loop turns let the write reach the socket by itself.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def event(self, body: Any) -> None:
        await self.write(b"data: " + orjson.dumps(body) + b"\n\n")

    async def done(self) -> None:
        """Send ``[DONE]`` and end the body."""
        await self.write(b"data: [DONE]\n\n")
        await self.end()

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def stream_bytes(self) -> bytes:
        """Return the body of a good streamed answer."""
        return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in self.chunks()) + b"data: [DONE]\n\n"

    async def stream(self, num_tokens: int | None = None, *, delay_s: float = 0.0, **changes: Any) -> None:
        """Start an event stream and send the first ``num_tokens`` content chunks, or all chunks."""
        await self.start()
        sent = 0
        for chunk in self.chunks(**changes):
            if num_tokens is not None and sent >= num_tokens:
                return
            await self.event(chunk)
            sent += is_content(chunk)
            if delay_s:
                await asyncio.sleep(delay_s)

    async def until_gone(self) -> None:
        """Wait for the client to hang up."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def repeat(self, data: bytes, *, delay_s: float = 0.0) -> None:
        """Write the same bytes again and again until the client hangs up."""
        gone = asyncio.create_task(self.until_gone())
        while not gone.done():
            await self.write(data)
            await asyncio.sleep(delay_s)

    def reset(self) -> None:
        """Drop the connection with a TCP reset."""
        for connection in self.server.connections():
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.scope is self.scope:
                raw = connection.transport.get_extra_info("socket")
                # Lingering for no time makes the close a reset instead of an orderly end.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.transport.abort()
                return
        raise AssertionError("the connection of this call is not there")


def is_content(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk carries a token."""
    if not chunk["choices"]:
        return False
    choice = chunk["choices"][0]
    delta = choice.get("delta", choice)
    return bool(delta.get("content") or delta.get("text") or delta.get("reasoning_content"))
