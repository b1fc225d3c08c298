"""Two gateway processes on one PostgreSQL and one Redis; and what happens when either of those goes away.

Times are printed, not asserted: ``pytest -s`` shows them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.config.policy_body import to_body
from gateway.config.store_section import StoreConfig
from gateway.control.change_feed import ChangeFeed
from gateway.control.control_writer import ControlWriter
from gateway.store.control import ControlStore
from gateway.store.records import PolicyVersion
from gateway.store.store import Store
from tests.faults import PrivatePostgres
from tests.gateway.control.processes import RedisProcess, ServerProcess, gateway_process
from tests.gateway.control.waiting import until
from tests.gateway.harness import LADDER_TOML, make_settings, running
from tests.gateway.raw import PATIENCE_S

pytestmark = pytest.mark.db


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
async def own_redis(tmp_path: Path, redis_program: str) -> AsyncIterator[RedisProcess]:
    server = RedisProcess(free_port(), tmp_path)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def two_servers(tmp_path: Path, url: str, redis_url: str | None) -> AsyncIterator[list[ServerProcess]]:
    redis = f'[redis]\nurl = "{redis_url}"\n' if redis_url else ""
    config = tmp_path / "two.toml"
    config.write_text(f'{LADDER_TOML}\n[database]\nurl = "{url}"\n[control]\nlease_s = 1\n{redis}')
    async with (
        gateway_process(config, free_port(), tmp_path / "a.log") as first,
        gateway_process(config, free_port(), tmp_path / "b.log") as second,
    ):
        yield [first, second]


@asynccontextmanager
async def operator(url: str, redis_url: str | None) -> AsyncIterator[ControlWriter]:
    """Somebody who changes what is in force from elsewhere."""
    async with Store(StoreConfig(url=url)) as store:
        bus = ChangeFeed(redis_url, lambda: None) if redis_url else None
        if bus is not None:
            bus.start()

        async def publish(generation: int) -> None:
            if bus is not None:
                bus.publish(generation)

        yield ControlWriter(ControlStore(store), publish)
        if bus is not None:
            await bus.close()


async def seen_by_both(servers: list[ServerProcess], change: Callable[[], Any], **wanted: Any) -> list[float]:
    """Seconds from the change's commit until each server says so."""
    waits = [asyncio.create_task(server.until(**wanted)) for server in servers]
    await asyncio.sleep(0.05)
    begun_s = asyncio.get_running_loop().time()
    await change()
    committed_s = asyncio.get_running_loop().time() - begun_s
    return [max(0.0, waited - 0.05 - committed_s) for waited in await asyncio.gather(*waits)]


@pytest.mark.parametrize("with_redis", [pytest.param(True, marks=pytest.mark.slow), False], ids=["redis", "looking"])
async def test_a_switch_and_an_edit_reach_both(
    tmp_path: Path, postgres_url: str, own_redis: RedisProcess, with_redis: bool
) -> None:
    redis_url = own_redis.url if with_redis else None
    async with two_servers(tmp_path, postgres_url, redis_url) as servers, operator(postgres_url, redis_url) as writer:
        if with_redis:
            await asyncio.gather(*(server.until(redis=True) for server in servers))
        times = []
        for n in range(5):
            on = n % 2 == 0
            throw = partial(writer.set_kill_switch, on, "test", by="ada")
            times += await seen_by_both(servers, throw, kill_switch=on)
        for server in servers:
            assert (await server.chat()).headers["x-suffice-reason"] == "kill_switch"
        await writer.set_kill_switch(False, "", by="ada")
        policy = make_settings(tmp_path).policies["default"]
        body = to_body(policy) | {"allowed_tiers": [1]}
        version = PolicyVersion(name="default", version="edited", created_at=datetime.now(UTC), body=body)
        generation = await writer.store.generation() + 1
        times += await seen_by_both(servers, lambda: writer.policies.put(version, by="ada"), generation=generation)
        for server in servers:
            assert (await server.chat()).headers["x-suffice-policy-version"] == "default@edited"
        shown = ", ".join(f"{each * 1e3:.0f}" for each in sorted(times))
        print(f"\nchanges seen after (ms, {'redis' if with_redis else 'looking'}): {shown}")


@pytest.mark.slow
async def test_one_leads_and_a_killed_leader_is_followed(tmp_path: Path, postgres_url: str) -> None:
    async with two_servers(tmp_path, postgres_url, None) as servers:
        leads = [False, False]
        async with asyncio.timeout(PATIENCE_S):
            while not any(leads):
                leads = [(await server.control())["is_leader"] for server in servers]
                assert not all(leads)
        leader, other = (servers[leads.index(value)] for value in (True, False))
        leader.kill()
        print(f"\nfollowed after {await other.until(is_leader=True):.2f} s, lease 1 s")


@pytest.mark.slow
async def test_redis_may_come_and_go_under_load(tmp_path: Path, postgres_url: str, own_redis: RedisProcess) -> None:
    url = own_redis.url
    async with two_servers(tmp_path, postgres_url, url) as servers, operator(postgres_url, url) as writer:
        await asyncio.gather(*(server.until(redis=True) for server in servers))
        answers: list[int] = []
        is_over = False

        async def load(server: ServerProcess) -> None:
            while not is_over:
                answers.append((await server.chat()).status_code)

        tasks = [asyncio.create_task(load(server)) for server in servers for _ in range(2)]
        await own_redis.stop()
        await asyncio.gather(*(server.until(redis=False) for server in servers))
        num_before = len(answers)
        down = await seen_by_both(servers, lambda: writer.set_kill_switch(True, "", by="ada"), kill_switch=True)
        await until(lambda: len(answers) > num_before + 20)
        await own_redis.start()
        await asyncio.gather(*(server.until(redis=True) for server in servers))
        back = await seen_by_both(servers, lambda: writer.set_kill_switch(False, "", by="ada"), kill_switch=False)
        is_over = True
        await asyncio.gather(*tasks)
        assert set(answers) == {200}
        shown = [f"{each * 1e3:.0f}" for each in (*down, *back)]
        print(f"\n{len(answers)} answers, none failed; changes seen after (ms): without, then with Redis {shown}")


@pytest.mark.slow
async def test_without_the_database_the_last_state_stays(tmp_path: Path, private_postgres: PrivatePostgres) -> None:
    settings = make_settings(
        tmp_path,
        database__url=private_postgres.url,
        database__connect_timeout_s=5,
        database__write_timeout_s=5,
        control__lease_s=1,
    )
    async with running(settings) as gateway:
        control = gateway.parts.control
        await control.writer.set_kill_switch(True, "fire", by="ada")
        await until(lambda: control.leader.lease is not None)
        private_postgres.stop()
        await until(lambda: bool(control.problem))
        told = (await gateway.client.get("/readyz")).json()["control"]
        assert told["kill_switch"]
        assert "last state" in told["problem"]
        assert gateway.parts.request_router.kill_switch
        await until(lambda: control.leader.lease is None)
        metrics = (await gateway.client.get("/metrics")).text
        assert "suffice_control_problem 1.0" in metrics
        private_postgres.start()
        await until(lambda: not control.problem)
        await control.writer.set_kill_switch(False, "", by="ada")
        assert (await gateway.chat()).status_code == 200
        assert not gateway.parts.request_router.kill_switch
        await until(lambda: control.leader.lease is not None)
