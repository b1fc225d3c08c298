"""The log fails under a serving gateway: callers are told, nothing hangs or leaks, service returns by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from starlette.applications import Starlette

from gateway.bench.echo_server import echo_app, echo_settings
from gateway.config.store_section import StoreConfig
from gateway.ids import is_uuid
from gateway.store.store import Store
from gateway.store.tables import configs
from tests.faults import PrivatePostgres, TinyDisk
from tests.gateway.live import LiveServer
from tests.gateway.raw import PATIENCE_S, until_refused

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"


def ask(text: str = "one two three four five six", **more: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": text}], **more}


@dataclass
class Running:
    """A serving gateway: its client, and the application to look into."""

    client: httpx.AsyncClient
    app: Starlette

    async def stream(
        self, text: str = "one two three four five six", *, begun: asyncio.Barrier | None = None
    ) -> list[Any]:
        """Every event of a stream; ``[DONE]`` is None. ``begun`` is met after the first."""
        events: list[Any] = []
        async with self.client.stream("POST", CHAT, json=ask(text, stream=True)) as response:
            if response.status_code != 200:
                return [json.loads(await response.aread())]
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append(None if data == "[DONE]" else json.loads(data))
                    if begun is not None and len(events) == 1:
                        await begun.wait()
        return events

    async def until_idle(self) -> None:
        """Nothing holds a place, no model runs, no row waits."""
        async with asyncio.timeout(PATIENCE_S):
            parts = self.app.state.parts
            while (  # noqa: ASYNC110  three rooms' counters, none of which announces itself
                parts.admission.num_running
                or parts.store.committer.num_pending
                or any(backend.num_running for backend in parts.backends.values())
            ):
                await asyncio.sleep(0.01)

    async def num_rows(self) -> int:
        return len(await self.app.state.parts.store.recent(limit=10_000))


@asynccontextmanager
async def serving(database_url: str, *, token_delay_s: float = 0.0, **overrides: object) -> AsyncIterator[Running]:
    settings = echo_settings(database_url, **overrides)
    app = echo_app(settings, token_delay_s=token_delay_s)
    async with LiveServer(app, settings) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield Running(client, app)


def assert_log_error(error: dict[str, Any], code: str) -> None:
    assert error["error"]["code"] == code
    assert error["error"]["type"] == "server_error"
    assert "hunter2" not in str(error)


async def assert_refused(gateway: Running, code: str, body: dict[str, Any]) -> None:
    response = await gateway.client.post(CHAT, json=body)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert_log_error(response.json(), code)


async def assert_served(gateway: Running) -> None:
    response = await gateway.client.post(CHAT, json=ask())
    assert response.status_code == 200, response.text
    request_id = response.headers["x-suffice-request-id"]
    found = await gateway.client.get(f"/v1/requests/{request_id}")
    assert found.status_code == 200


async def until_served(gateway: Running, body: dict[str, Any] | None = None) -> None:
    """The log is asked once a second whether it takes rows again; until then it is no use to ask a model."""
    async with asyncio.timeout(PATIENCE_S):
        while (await gateway.client.post(CHAT, json=body or ask())).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.db
async def test_postgres_dies_under_streams_and_comes_back(private_postgres: PrivatePostgres) -> None:
    async with serving(private_postgres.url, token_delay_s=0.1, database__connect_timeout_s=2) as gateway:
        await assert_served(gateway)
        begun = asyncio.Barrier(17)
        streams = [asyncio.create_task(gateway.stream("word " * 40, begun=begun)) for _ in range(16)]
        await begun.wait()
        await asyncio.to_thread(private_postgres.stop)
        async with asyncio.timeout(PATIENCE_S):
            for events in await asyncio.gather(*streams):
                assert None not in events, "what is not in the log must not look complete"
                assert_log_error(events[-1], "log_unavailable")
            await assert_refused(gateway, "log_unavailable", ask())
            assert (await gateway.client.get("/healthz")).status_code == 200
            assert (await gateway.client.get("/v1/requests/01a1fd57-f4af-7933-bb01-2e25c49f73a6")).status_code == 503
        await gateway.until_idle()
        await asyncio.to_thread(private_postgres.start)
        await until_served(gateway)
        assert await gateway.num_rows() == 2


@pytest.mark.slow
@pytest.mark.db
async def test_a_frozen_postgres_is_given_up_on(private_postgres: PrivatePostgres) -> None:
    # Short enough to wait for, and long for a write of a busy machine: the first request here must be served.
    limits = {"database__connect_timeout_s": 4, "database__write_timeout_s": 4}
    async with serving(private_postgres.url, **limits) as gateway:
        await assert_served(gateway)
        frozen = private_postgres.freeze()
        try:
            async with asyncio.timeout(PATIENCE_S):
                answers = await asyncio.gather(*(gateway.stream() for _ in range(8)))
        finally:
            private_postgres.thaw(frozen)
        for events in answers:
            assert_log_error(events[-1], "log_unavailable")
        await gateway.until_idle()
        await until_served(gateway)


async def test_a_full_disk_under_a_serving_gateway(tiny_disk: TinyDisk) -> None:
    disk = tiny_disk.resize(3)
    big = ask("x" * 100_000)
    async with serving(f"sqlite:///{disk / 'suffice.db'}", log__prompts="full") as gateway:
        num_served = 0
        async with asyncio.timeout(60):
            while (response := await gateway.client.post(CHAT, json=big)).status_code == 200:
                num_served += 1
        assert num_served > 0
        assert_log_error(response.json(), "log_full")
        assert_log_error((await gateway.stream("x" * 100_000))[-1], "log_full")
        # What is stored can still be read.
        stored = (await gateway.app.state.parts.store.recent(limit=1))[0]
        assert (await gateway.client.get(f"/v1/requests/{stored.request_id}")).status_code == 200
        await gateway.until_idle()
        tiny_disk.resize(30)
        await until_served(gateway, big)
        await assert_served(gateway)
        assert await gateway.num_rows() == num_served + 2


@pytest.mark.slow
async def test_sigterm_lets_running_answers_finish(database_url: str, free_port: int) -> None:
    command = [sys.executable, "-m", "gateway.bench.echo_server", "--token-delay-s", "0.05"]
    command += ["--port", str(free_port), "--database-url", database_url]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    url = f"http://127.0.0.1:{free_port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            await until_healthy(client)
            gateway = Running(client, Starlette())
            begun = asyncio.Barrier(17)
            streams = [asyncio.create_task(gateway.stream("word " * 100, begun=begun)) for _ in range(16)]
            await begun.wait()
            process.send_signal(signal.SIGTERM)
            await until_refused(url)
            answers = await asyncio.gather(*streams)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) in (0, -signal.SIGTERM)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert all(events[-1] is None for events in answers), "a drained stream ends whole"
    async with Store(StoreConfig(url=database_url)) as store:
        rows = await store.recent()
    assert len(rows) == 16
    assert {row.finish_reason for row in rows} == {"stop"}
    assert all(is_uuid(row.request_id) for row in rows)


async def until_healthy(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/healthz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


def start_refused(**environment: str) -> str:
    """What ``suffice serve`` says on standard error when it cannot start; checks that it says it well."""
    environ = {**os.environ, "SUFFICE_ROUTER__ARTIFACT": "none", "SUFFICE_SERVER__PORT": "0", **environment}
    command = [sys.executable, "-m", "gateway.cli", "serve"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("suffice: ")
    return done.stderr


def test_postgres_down_at_start_is_named_without_its_password(free_port: int) -> None:
    said = start_refused(SUFFICE_DATABASE__URL=f"postgresql://someone:hunter2@127.0.0.1:{free_port}/suffice")
    assert f"postgresql://someone:***@127.0.0.1:{free_port}/suffice does not answer" in said
    assert "hunter2" not in said


def test_a_file_that_is_no_database_is_named_at_start(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"dear diary, " * 1000)
    said = start_refused(SUFFICE_DATABASE__URL=f"sqlite:///{path}")
    assert str(path) in said
    assert path.read_bytes() == b"dear diary, " * 1000


def test_a_place_that_cannot_be_written_is_named_at_start(tmp_path: Path) -> None:
    path = tmp_path / "suffice.db"
    path.mkdir()
    assert str(path) in start_refused(SUFFICE_DATABASE__URL=f"sqlite:///{path}")


@pytest.mark.db
async def test_the_stored_configuration_holds_no_password(postgres_url: str) -> None:
    """What ``config_hash`` stands for may be read by whoever reads the log."""
    url = postgres_url.replace("postgres@", "postgres:hunter2@")
    async with serving(url) as gateway:
        await assert_served(gateway)
        store = gateway.app.state.parts.store
        (row,) = await store.recent()
        async with store.transaction() as connection:
            kept = select(configs.c.body).where(configs.c.config_hash == row.config_hash)
            body = (await connection.execute(kept)).scalar_one()
    assert body["server.max_concurrency"] == 1024
    assert "hunter2" not in str(body)
