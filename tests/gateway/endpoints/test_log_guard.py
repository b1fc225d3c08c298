"""A log that takes no rows stops spending: no tier is asked for what would be withheld (security review M1)."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from pathlib import Path

import asyncpg
import httpx
import pytest

from backends.testing import EchoBackend
from tests.faults import PrivatePostgres, TinyDisk
from tests.gateway.harness import Gateway, assert_error, make_settings, running
from tests.gateway.raw import PATIENCE_S


def num_asked(gateway: Gateway) -> int:
    """How many requests reached a tier."""
    return sum(len(each.requests) for each in gateway.backends.values() if isinstance(each, EchoBackend))


async def ask_many(gateway: Gateway, code: str, count: int = 10) -> None:
    for _ in range(count):
        assert_error(await gateway.chat("hi"), 503, code)


async def assert_unready(gateway: Gateway) -> None:
    answer = await gateway.client.get("/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "database")


async def until_answered(gateway: Gateway) -> httpx.Response:
    """Ask until it is answered: what is known of the log is a second old at most."""
    async with asyncio.timeout(PATIENCE_S):
        while (response := await gateway.chat("hi")).status_code == 503:  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.05)
    return response


async def test_a_locked_file_is_asked_of_once_and_not_again(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    settings = make_settings(tmp_path, database__url=f"sqlite:///{path}", database__busy_timeout_s=0.1)
    async with running(settings) as gateway:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN EXCLUSIVE")
        try:
            # Nothing is known yet: this one is in flight when the log fails.
            await ask_many(gateway, "log_unavailable", 1)
            assert num_asked(gateway) == 1
            await ask_many(gateway, "log_unavailable")
            assert num_asked(gateway) == 1
            await assert_unready(gateway)
        finally:
            other.execute("ROLLBACK")
            other.close()
        assert (await until_answered(gateway)).status_code == 200
        assert (await gateway.client.get("/readyz")).status_code == 200
        gateway.assert_idle()


async def test_however_many_ask_the_log_is_tried_once_a_second(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    settings = make_settings(tmp_path, database__url=f"sqlite:///{path}", database__busy_timeout_s=0.05)
    async with running(settings) as gateway:
        clock = [100.0]
        committer = gateway.parts.store.committer
        committer._clock = lambda: clock[0]
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN EXCLUSIVE")
        await ask_many(gateway, "log_unavailable", 1)
        for num_probes in (1, 2, 3):
            await asyncio.gather(*(gateway.chat("hi") for _ in range(20)))
            assert committer.num_probes == num_probes
            clock[0] += 1.0
        other.execute("ROLLBACK")
        other.close()
        assert (await gateway.chat("hi")).status_code == 200
        assert committer.num_probes == 4
        # A log that works is not probed.
        assert (await gateway.chat("hi")).status_code == 200
        assert committer.num_probes == 4
        assert num_asked(gateway) == 3


async def test_embeddings_stop_as_well(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    settings = make_settings(tmp_path, database__url=f"sqlite:///{path}", database__busy_timeout_s=0.05)
    async with running(settings) as gateway:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN EXCLUSIVE")
        await ask_many(gateway, "log_unavailable", 1)
        body = {"model": "small", "input": "hi"}
        response = await gateway.client.post("/v1/embeddings", json=body)
        assert_error(response, 503, "log_unavailable")
        other.execute("ROLLBACK")
        other.close()


async def test_a_full_disk(tmp_path: Path) -> None:
    disk = TinyDisk()
    try:
        folder = disk.resize(8)
        settings = make_settings(tmp_path, database__url=f"sqlite:///{folder / 'log.db'}")
        async with running(settings) as gateway:
            assert (await gateway.chat("before")).status_code == 200
            with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
                while filler.write(b"x" * 512):
                    pass
            asked = num_asked(gateway)
            codes = {(await gateway.chat("word " * 2000)).json()["error"]["code"] for _ in range(10)}
            assert codes == {"log_full"}
            assert num_asked(gateway) <= asked + 1
            await assert_unready(gateway)
            (folder / "filler").unlink()
            assert (await until_answered(gateway)).status_code == 200
    finally:
        disk.remove()


@pytest.mark.db
async def test_a_cut_connection_costs_nothing_and_comes_back_at_once(tmp_path: Path, postgres_url: str) -> None:
    name = postgres_url.rsplit("/", 1)[1]
    admin = await asyncpg.connect(f"{postgres_url.rsplit('/', 1)[0]}/postgres")
    async with running(make_settings(tmp_path, database__url=postgres_url)) as gateway:
        assert (await gateway.chat("before")).status_code == 200
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        # The writer's socket has to learn of its end.
        await asyncio.sleep(0.1)
        await ask_many(gateway, "log_unavailable")
        assert num_asked(gateway) == 1, "none of the ten was spent on"
        await assert_unready(gateway)
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        assert (await until_answered(gateway)).status_code == 200
        assert (await gateway.client.get("/readyz")).status_code == 200
        assert len(await gateway.rows()) == 2
    await admin.close()


@pytest.mark.slow
@pytest.mark.db
async def test_a_stopped_and_a_frozen_cluster(tmp_path: Path, private_postgres: PrivatePostgres) -> None:
    options = {"database__connect_timeout_s": 2.0, "database__write_timeout_s": 2.0}
    async with running(make_settings(tmp_path, database__url=private_postgres.url, **options)) as gateway:
        assert (await gateway.chat("before")).status_code == 200
        await asyncio.to_thread(private_postgres.stop)
        await asyncio.sleep(0.1)
        await ask_many(gateway, "log_unavailable")
        assert num_asked(gateway) == 1
        await assert_unready(gateway)
        await asyncio.to_thread(private_postgres.start)
        assert (await until_answered(gateway)).status_code == 200
        asked = num_asked(gateway)
        frozen = private_postgres.freeze()
        try:
            # A frozen one looks well until the first row waits in vain.
            await ask_many(gateway, "log_unavailable", 1)
            await ask_many(gateway, "log_unavailable", 4)
            assert num_asked(gateway) == asked + 1
        finally:
            private_postgres.thaw(frozen)
        assert (await until_answered(gateway)).status_code == 200
        gateway.assert_idle()
