"""Many connections at once: idle ones make room, busy ones leave a few for health, slow ones come to an end."""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest

from backends.testing import Script
from gateway.edge.file_limit import raise_file_limit
from gateway.edge.http_protocol import NUM_SPARE
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running
from tests.gateway.raw import RawClient, eventually

ASK = {"model": "simple", "messages": [{"role": "user", "content": "hi"}]}
STREAM = ASK | {"stream": True}


def connections_of(gateway: Gateway) -> object:
    return gateway.app.state.server.config.http.open_connections


async def fresh(gateway: Gateway, path: str = "/healthz") -> httpx.Response:
    """Ask on a new connection."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        return await (client.get(path) if path != "/v1/chat/completions" else client.post(path, json=ASK))


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_idle_connections_make_room_for_new_ones(tmp_path: Path, sent: bytes) -> None:
    """Never used, half a head, or kept alive: none holds a place for long where others want one."""
    async with running(make_settings(tmp_path, server__max_connections=8)) as gateway, AsyncExitStack() as stack:
        clients = []
        for _ in range(40):
            client = await stack.enter_async_context(RawClient(gateway.url))
            client.writer.write(sent)
            clients.append(client)
            await asyncio.sleep(0.005)
        assert (await fresh(gateway)).status_code == 200
        assert (await fresh(gateway, "/v1/chat/completions")).status_code == 200
        books = connections_of(gateway)
        await eventually(lambda: books.num_open <= 8)  # type: ignore[attr-defined]
        with suppress(ConnectionError):
            assert not (await clients[0].reader.read(1000)).count(b"HTTP/1.1 5"), "the oldest went first, unanswered"
            assert await clients[0].reader.read(1000) == b""


async def test_where_all_are_busy_health_can_still_be_asked(tmp_path: Path) -> None:
    backends = echo_backends(small=Script(hang_after=1))
    async with (
        running(make_settings(tmp_path, server__max_connections=2), backends) as gateway,
        AsyncExitStack() as stack,
    ):
        await gateway.client.aclose()
        for _ in range(2):
            client = await stack.enter_async_context(RawClient(gateway.url))
            await client.post("/v1/chat/completions", STREAM)
            await client.read_until(b"data: ")
        for _ in range(2 * NUM_SPARE):
            assert (await fresh(gateway)).status_code == 200
        refused = await fresh(gateway, "/v1/chat/completions")
        assert_error(refused, 503, "overloaded")
        assert refused.headers["connection"] == "close"
        assert gateway.parts.admission.num_running == 2, "nobody who is served was cut off"


async def test_what_was_opened_and_closed_is_counted_no_longer(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, server__max_connections=4)) as gateway:
        for _ in range(12):
            async with RawClient(gateway.url) as client:
                client.writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                await client.read_until(b"ok")
        await gateway.client.aclose()
        books = connections_of(gateway)
        await eventually(lambda: books.num_open == 0)  # type: ignore[attr-defined]
        assert not books._unused  # type: ignore[attr-defined]
        assert not books._kept_alive  # type: ignore[attr-defined]


async def test_a_client_that_takes_its_answer_by_drops_is_cut_off(tmp_path: Path) -> None:
    """The kernel sees it take something again and again (security review M4: and slow readers)."""
    backends = echo_backends(small=Script(text="x" * 2_000_000))
    configured = make_settings(tmp_path, server__request_timeout_s=0.5, server__slow_client_timeout_s=0.3)
    async with (
        running(configured, backends, send_buffer_bytes=16_384) as gateway,
        RawClient(gateway.url, receive_buffer_bytes=4096) as client,
    ):
        await gateway.client.aclose()
        await client.post("/v1/chat/completions", ASK)
        connections = gateway.app.state.server.server_state.connections
        await eventually(lambda: len(connections) == 1)
        num_read = 0
        with suppress(ConnectionError):
            while connections:
                num_read += len(await client.reader.read(64))
                await asyncio.sleep(0.01)
        assert num_read < 1_000_000
        gateway.assert_idle()


def test_the_soft_limit_on_files_is_raised_and_the_bound_follows_the_hard_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 2000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: kept.append(limits))
    assert raise_file_limit(1000) == 1000
    assert raise_file_limit(4096) == 2000 - 512
    assert kept == [(1512, 2000), (2000, 2000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100_000, 100_000))
    assert raise_file_limit(4096) == 4096
    assert len(kept) == 2
