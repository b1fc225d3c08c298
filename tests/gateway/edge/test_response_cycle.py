"""A response is the same bytes whether its head is held back for its body or uvicorn writes the two."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.bench.echo_server import echo_settings
from gateway.edge import http_protocol
from gateway.edge.response_cycle import OneWriteCycle
from tests.gateway.edge.test_http_protocol import talk
from tests.gateway.live import LiveServer

_TEXT = (b"content-type", b"text/plain")


def _start(status: int, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def _body(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


# Path -> what the application sends.
_RESPONSES: dict[str, list[dict[str, Any]]] = {
    "/whole": [_start(200, _TEXT, (b"content-length", b"5")), _body(b"whole")],
    "/empty": [_start(200, (b"content-length", b"0")), _body(b"")],
    "/in-two": [_start(413, (b"content-length", b"6")), _body(b"one", more=True), _body(b"two")],
    "/longer": [_start(200, (b"content-length", b"3")), _body(b"four")],
    "/shorter": [_start(200, (b"content-length", b"5")), _body(b"four")],
    "/stream": [_start(200, _TEXT), _body(b"a", more=True), _body(b"", more=True), _body(b"b" * 300)],
    "/no-stream": [_start(200, _TEXT), _body(b"")],
    "/no-body": [_start(200, _TEXT, (b"content-length", b"5"))],
    "/twice": [_start(200, (b"content-length", b"1")), _body(b"1"), _body(b"2")],
    "/no-content": [_start(204), _body(b"")],
    "/not-modified": [_start(304, (b"content-length", b"5")), _body(b"")],
    "/close": [_start(200, (b"content-length", b"5"), (b"connection", b"close")), _body(b"whole")],
    "/chunked": [_start(200, (b"transfer-encoding", b"chunked")), _body(b"a", more=True), _body(b"")],
    "/upper": [_start(200, (b"Content-Length", b"5"), (b"X-Name", b"1")), _body(b"whole")],
    "/cookies": [_start(200, (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-length", b"0")), _body(b"")],
    "/value": [_start(200, (b"x-name", b"a\nx-made-up: b"), (b"content-length", b"5")), _body(b"whole")],
    "/tab": [_start(200, (b"x-name", b"a\tb"), (b"content-length", b"5")), _body(b"whole")],
    "/name": [_start(200, (b"x name", b"a"), (b"content-length", b"5")), _body(b"whole")],
    "/no-start": [_body(b"whole")],
}


# The application fails between head and end, and the connection is closed: a head may be left unsent.
_BROKEN_OFF = frozenset({"/longer", "/no-body"})


async def _app(scope: Any, receive: Any, send: Any) -> None:
    for message in _RESPONSES[scope["path"]]:
        await send(dict(message))


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    settings = echo_settings(f"sqlite:///{tmp_path / 'suffice.db'}")
    async with LiveServer(Starlette(routes=[Mount("/", _app)]), settings) as url:
        yield int(url.rsplit(":", 1)[1])


@pytest.mark.parametrize("path", _RESPONSES)
async def test_the_bytes_are_uvicorns(path: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests on one connection, the last of which ends it."""
    lines = [b"%b %b HTTP/1.1\r\nhost: x\r\n" % (method, path.encode()) for method in (b"GET", b"HEAD")]
    asked = [b"%b\r\n%bconnection: close\r\n\r\n" % (line, line) for line in lines]
    ours = [_undated(await talk(port, [each])) for each in asked]
    monkeypatch.setattr(http_protocol, "OneWriteCycle", RequestResponseCycle)
    uvicorns = [_undated(await talk(port, [each])) for each in asked]
    if path in _BROKEN_OFF:
        assert all(theirs.startswith(each) for theirs, each in zip(uvicorns, ours, strict=True))
    else:
        assert ours == uvicorns


def _undated(answer: bytes) -> bytes:
    return re.sub(rb"date: [^\r]*\r\n", b"", answer)


async def test_a_head_whose_body_is_slow_leaves_before_it(tmp_path: Path) -> None:
    read = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send(_start(200, _TEXT))
        await read.wait()
        await send(_body(b"done"))

    settings = echo_settings(f"sqlite:///{tmp_path / 'suffice.db'}")
    async with LiveServer(Starlette(routes=[Mount("/", slow)]), settings) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        read.set()
        assert await reader.readuntil(b"\r\n0\r\n\r\n") == b"4\r\ndone\r\n0\r\n\r\n"
        writer.close()


async def test_a_whole_answer_is_one_write(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    hold = OneWriteCycle._hold_head

    def watched(cycle: OneWriteCycle, message: Any) -> bool:
        write = cycle.transport.write

        class Transport:
            def __getattr__(self, name: str) -> Any:
                return getattr(transport, name)

            def write(self, data: bytes) -> None:
                written.append(data)
                write(data)

        transport = cycle.transport
        cycle.transport = Transport()  # type: ignore[assignment]
        return hold(cycle, message)

    monkeypatch.setattr(OneWriteCycle, "_hold_head", watched)
    answer = await talk(port, [b"GET /whole HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"])
    assert written == [answer]
