"""Before a request is understood: heads without end, connections without requests, bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from gateway.bench.echo_server import echo_app, echo_settings
from gateway.edge.http_protocol import BoundedHttpProtocol
from gateway.edge.responder import Responder
from gateway.edge.watchdog import Watchdog
from tests.gateway.live import LiveServer
from tests.gateway.raw import PATIENCE_S

BODY = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "hello"}]}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
async def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.5)
    chosen = echo_settings(f"sqlite:///{tmp_path / 'suffice.db'}", log__level="error")
    async with LiveServer(echo_app(chosen), chosen) as url:
        yield int(url.rsplit(":", 1)[1])


async def talk(port: int, parts: Iterable[bytes], *, pause_s: float = 0.0) -> bytes:
    """Send parts one by one; everything that comes back until the server closes.

    It reads beside writing: what is sent to a closed connection has it reset, and what was not read until then is lost.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()

    async def read() -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(65_536):
                received.extend(chunk)

    reading = asyncio.create_task(read())
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
    try:
        await asyncio.wait_for(reading, PATIENCE_S)
    finally:
        writer.close()
    return bytes(received)


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"content-length: %d\r\n" % len(body) in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def assert_served(port: int) -> None:
    assert (await talk(port, [REQUEST])).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\x01garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_json_all_the_same(port: int, content: bytes) -> None:
    answer = await talk(port, [content])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_of(answer)["code"] == "invalid_http"
    await assert_served(port)


@pytest.mark.parametrize("line", [b"X-%d: " + b"a" * 8000 + b"\r\n", b"X-%d: a\r\n" * 500])
async def test_headers_without_end_are_refused(port: int, line: bytes) -> None:
    answer = await talk(port, [HEAD, *([line.replace(b"%d", b"1")] * 40)])
    # The refusal may be lost with the connection, where the client was still sending.
    if answer:
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert error_of(answer)["code"] == "headers_too_large"
    await assert_served(port)


@pytest.mark.parametrize("num_over", [-1, 0, 1, 10_000, 100_000])
@pytest.mark.parametrize("name_bytes", [1, 30_000])
@pytest.mark.parametrize("before", [b"", REQUEST.replace(b"Connection: close\r\n", b"")])
async def test_the_heads_limit_holds_however_it_is_read(
    port: int, num_over: int, name_bytes: int, before: bytes
) -> None:
    """One that came in few reads was measured too late (security review L7, fault review S9)."""
    head, _, body = REQUEST.partition(b"\r\n\r\n")
    filler = b"a" * name_bytes
    num_missing = BoundedHttpProtocol.max_head_bytes + num_over - len(head) - len(b"\r\n\r\n\r\n: ") - name_bytes
    head += b"\r\n" + filler + b": " + b"b" * num_missing + b"\r\n\r\n"
    assert len(head) == BoundedHttpProtocol.max_head_bytes + num_over
    answer = await talk(port, [before + head + body])
    last = answer[answer.rindex(b"HTTP/1.1 ") :] if answer else b""
    if num_over <= 0:
        assert last.startswith(b"HTTP/1.1 200 OK\r\n")
    elif last and not before:
        assert last.startswith(b"HTTP/1.1 431 ")
        assert error_of(last)["code"] == "headers_too_large"
    assert answer.count(b"HTTP/1.1 200 OK") == (num_over <= 0) + (bool(before) and answer.count(b"200 OK") > 0)
    await assert_served(port)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n", b"Connection: close\r\n"])
async def test_a_client_of_http_1_0_gets_no_chunks(port: int, is_streamed: bool, connection: bytes) -> None:
    """It would take their lengths for text (fault review S9)."""
    body = BODY.replace(b"}]}", b'}], "stream": true}') if is_streamed else BODY
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + connection + b"Content-Length: %d\r\n\r\n" % len(body)
    answer_head, _, content = (await talk(port, [head + body])).partition(b"\r\n\r\n")
    assert b" 200 OK" in answer_head.splitlines()[0]
    assert b"transfer-encoding" not in answer_head.lower()
    assert b"connection: close" in answer_head.lower()
    if is_streamed:
        assert b"content-length" not in answer_head.lower()
        assert all(not line or line.startswith((b"data: ", b":")) for line in content.split(b"\n"))
        assert content.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(content)["choices"]
        assert b"content-length: %d" % len(content) in answer_head.lower()


async def test_a_flood_of_headers_is_cut_off_early(port: int) -> None:
    _reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD)
    num_sent = 0
    line = b"X-A: " + b"a" * 65_536 + b"\r\n"
    try:
        while num_sent < 200 * 2**20:
            writer.write(line)
            await writer.drain()
            num_sent += len(line)
    except ConnectionError:
        pass
    assert num_sent < 20 * 2**20
    writer.close()
    await assert_served(port)


async def test_a_head_that_dribbles_is_refused(port: int) -> None:
    async with asyncio.timeout(10):
        answer = await talk(port, [REQUEST[place : place + 1] for place in range(15)], pause_s=0.02)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer)["code"] == "request_timeout"


async def test_a_connection_without_a_request_is_closed(port: int) -> None:
    async with asyncio.timeout(10):
        assert await talk(port, []) == b""


async def test_a_second_head_on_the_same_connection_is_bounded_too(port: int) -> None:
    first = REQUEST.replace(b"Connection: close", b"Connection: keep-alive")
    async with asyncio.timeout(10):
        answer = await talk(port, [first, HEAD], pause_s=0.3)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"HTTP/1.1 408 " in answer


async def test_a_slow_body_has_the_time_of_a_body(port: int) -> None:
    """The head's clock stops with the head."""
    head, body = REQUEST.split(b"\r\n\r\n", 1)
    answer = await talk(port, [head + b"\r\n\r\n", body[:10], body[10:20], body[20:]], pause_s=0.3)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@given(cuts=st.lists(st.integers(1, len(REQUEST) - 1), max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_request_may_arrive_in_any_pieces(port: int, cuts: list[int]) -> None:
    places = [0, *sorted(set(cuts)), len(REQUEST)]
    pieces = [REQUEST[begin:end] for begin, end in pairwise(places)]
    assert (await talk(port, pieces, pause_s=0.001)).startswith(b"HTTP/1.1 200 OK\r\n")


@given(content=st.binary(min_size=1, max_size=200))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_bytes_get_a_refusal_or_a_closed_connection(port: int, content: bytes) -> None:
    answer = await talk(port, [content + b"\r\n\r\n"])
    assert answer == b"" or 400 <= int(answer[9:12]) < 500


async def test_requests_sent_together_are_answered_in_turn(port: int) -> None:
    bodies = [BODY.replace(b"hello", b"word " * count) for count in (1, 2, 3)]
    requests = [HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies]
    answers = (await talk(port, [b"".join([*requests, REQUEST])])).split(b"HTTP/1.1 200 OK\r\n")
    assert [answer.count(b"word") for answer in answers] == [0, 1, 2, 3, 0]


async def test_what_stands_around_the_endpoints_is_not_passed_by(tmp_path: Path) -> None:
    chosen = echo_settings(
        f"sqlite:///{tmp_path / 'suffice.db'}", log__level="error", server__cors_origins=("https://app.example",)
    )
    async with LiveServer(echo_app(chosen), chosen) as url:
        asked = REQUEST.replace(b"Host: localhost", b"Host: localhost\r\nOrigin: https://app.example")
        answer = await talk(int(url.rsplit(":", 1)[1]), [asked])
    assert b"\r\naccess-control-allow-origin: https://app.example\r\n" in answer


class TwoLines:
    """An endpoint that lets a line break into a header."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Responder(send, Watchdog(receive, timeout_s=5.0, stall_timeout_s=5.0)).whole(
            200, [(b"x-model", b"a\r\nx-made-up: b")], b"answer"
        )


async def test_a_line_break_in_a_header_makes_no_header(tmp_path: Path) -> None:
    chosen = echo_settings(f"sqlite:///{tmp_path / 'suffice.db'}", log__level="error")
    app = Starlette(routes=[Route("/v1/chat/completions", TwoLines(), methods=["POST"])])
    async with LiveServer(app, chosen) as url:
        answer = await talk(int(url.rsplit(":", 1)[1]), [REQUEST])
    assert answer == b"", "the connection is closed, as by ASGI's way"
