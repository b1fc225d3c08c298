"""Every call to a priced remote model is covered by the database before it begins, through the whole gateway.

A provider over real HTTP counts what it is asked for, and looks into the database at that very moment.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.bench.child_server import free_port
from gateway.config.settings import Settings
from gateway.config.store_section import StoreConfig
from gateway.models.loader import make_backends
from gateway.store.control import ControlStore
from gateway.store.control_records import Alert
from gateway.store.store import Store
from policies.pricing import from_nano_usd, to_nano_usd
from tests.gateway.control.processes import gateway_process
from tests.gateway.control.waiting import until
from tests.gateway.harness import assert_error, make_settings, running
from tests.gateway.verify.jobs import draw_jobs

MAX_TOKENS = 50
_TOML = """
[[tiers]]
name = "near"
model = "near"
[[tiers]]
name = "far"
model = "far"
price_per_request_usd = 0.01
price_per_input_token_usd = 0.0001
price_per_output_token_usd = 0.001

[models.near]
kind = "echo"
[models.far]
kind = "remote"
urls = ["{url}/v1"]
model = "m"
context_length = 4096
capabilities = ["generate", "logprobs", "continue"]
retry.base_s = 0.01
breaker.failure_threshold = 1000

[router]
artifact = "none"
[verification]
enabled = false
[learning]
enabled = false
[control]
lease_s = 1
"""


class CountingProvider:
    """Bills every call in full the moment it comes: the prompt's tokens, and all the tokens that were allowed.

    A prompt says what is done: the answer to ``hang`` never ends, that to ``break`` breaks off, the first call of all
    fails for ``fail``.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.billed_nano_usd = 0
        self.at_call: Callable[[], None] = lambda: None
        self.app = Starlette(routes=[Route("/v1/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        if request.method == "GET":
            return JSONResponse({"data": []})
        body = await request.json()
        if "input" in body:
            return self._vectors(body["input"])
        prompt = body["messages"][-1]["content"]
        num_prompt, num_output = len(prompt) // 2 + 8, body.get("max_tokens", MAX_TOKENS)
        self.num_calls += 1
        self.billed_nano_usd += 10_000_000 + 100_000 * num_prompt + 1_000_000 * num_output
        self.at_call()
        if prompt == "fail" and self.num_calls == 1:
            return JSONResponse({"error": {"message": "broken"}}, 500)
        return StreamingResponse(self._chunks(prompt, num_prompt, num_output), media_type="text/event-stream")

    def _vectors(self, texts: list[str]) -> Response:
        num_prompt = sum(map(len, texts))
        self.num_calls += 1
        self.billed_nano_usd += 100_000 * num_prompt
        self.at_call()
        rows = [{"index": place, "embedding": [1.0, 0.0]} for place in range(len(texts))]
        return JSONResponse({"data": rows, "usage": {"prompt_tokens": num_prompt}})

    async def _chunks(self, prompt: str, num_prompt: int, num_output: int) -> Any:
        def event(delta: dict[str, str], finish: str | None = None, **more: Any) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            return b"data: " + orjson.dumps({"id": "i", "choices": [choice], **more}) + b"\n\n"

        yield event({"role": "assistant", "content": "yes"})
        if prompt == "hang":
            await asyncio.sleep(600)
        if prompt == "break":
            return
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        yield event({}, "stop", usage=usage | {"total_tokens": num_prompt + num_output})
        yield b"data: [DONE]\n\n"


class CoverWatch:
    """Looks into the database at every call; ``uncovered`` are the sums (billed, covered) that were too small."""

    def __init__(self, counting: CountingProvider, file: str) -> None:
        self.uncovered: list[tuple[int, int]] = []
        self._counting = counting
        self._file = file
        counting.at_call = self._look

    def _look(self) -> None:
        with closing(sqlite3.connect(self._file, timeout=30)) as connection:
            (amount,) = connection.execute("SELECT sum(amount_nano_usd) FROM spending_leases").fetchone()
        if self._counting.billed_nano_usd > (amount or 0):
            self.uncovered.append((self._counting.billed_nano_usd, amount))


@pytest.fixture
def provider(serve: Callable[[Any], str]) -> tuple[CountingProvider, str]:
    counting = CountingProvider()
    return counting, serve(counting.app)


def settings_of(tmp_path: Path, url: str, **overrides: Any) -> Settings:
    return make_settings(tmp_path, _TOML.format(url=url), **overrides)


@pytest.mark.parametrize(
    ("asked", "num_calls"),
    [
        ({}, 1),
        ({"stream": True}, 1),
        ({"n": 3}, 3),
        ({"content": "fail"}, 2),
        ({"content": "break"}, 2),
        ({"content": "x" * 5000}, 1),
    ],
    ids=["whole", "stream", "choices", "retry", "continuation", "long"],
)
async def test_the_database_covers_a_call_when_it_arrives(
    tmp_path: Path, provider: tuple[CountingProvider, str], asked: dict[str, Any], num_calls: int
) -> None:
    counting, url = provider
    settings = settings_of(tmp_path, url)
    file = settings.database.url.removeprefix("sqlite:///")
    covers = CoverWatch(counting, file)
    async with running(settings, make_backends(settings)) as gateway:
        body = {"content": "short", "model": "far", "max_tokens": MAX_TOKENS} | asked
        response = await gateway.chat(**body)
        assert response.status_code == 200, response.text
        assert counting.num_calls == num_calls
        assert covers.uncovered == []
        # The row is there, so nothing is held any more.
        assert gateway.parts.lease.held_nano_usd == 0
        (row,) = await gateway.rows()
        assert row.cost_usd > 0
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT count(*) FROM spending_leases").fetchone() == (0,)


async def test_the_database_covers_a_check_when_it_arrives(
    tmp_path: Path, provider: tuple[CountingProvider, str]
) -> None:
    counting, url = provider
    checks = 'graders = ["final_answer", "overlap", "judge"]\npoll_s = 0.05\nallowance_usd = 1e6\n'
    toml = _TOML.format(url=url).replace("[verification]\nenabled = false\n", f"[verification]\n{checks}")
    settings = make_settings(tmp_path, toml)
    file = settings.database.url.removeprefix("sqlite:///")
    covers = CoverWatch(counting, file)
    async with running(settings, make_backends(settings)) as gateway:
        await draw_jobs(gateway.parts.store, 1, created_at=datetime.now(UTC))
        await gateway.parts.verifier.look()
        await until(lambda: gateway.parts.verifier.metrics.endings["done"] > 0)
        # The second answer, and the judge with both orders.
        assert counting.num_calls == 3
        assert covers.uncovered == []
        await until(lambda: gateway.parts.lease.held_nano_usd == 0)


async def test_the_database_covers_vectors_when_they_are_asked_for(
    tmp_path: Path, provider: tuple[CountingProvider, str]
) -> None:
    counting, url = provider
    settings = make_settings(tmp_path, _TOML.format(url=url).replace('"continue"]', '"embed"]'))
    covers = CoverWatch(counting, settings.database.url.removeprefix("sqlite:///"))
    async with running(settings, make_backends(settings)) as gateway:
        asked = {"model": "far", "input": ["x" * 3000, "y"]}
        response = await gateway.client.post("/v1/embeddings", json=asked)
        assert response.status_code == 200, response.text
        assert (counting.num_calls, covers.uncovered) == (1, [])
        assert gateway.parts.lease.held_nano_usd == 0
        (row,) = await gateway.rows()
        assert to_nano_usd(row.cost_usd) == counting.billed_nano_usd


async def test_local_tiers_cost_no_write(tmp_path: Path, provider: tuple[CountingProvider, str]) -> None:
    counting, url = provider
    settings = settings_of(tmp_path, url)
    async with running(settings, make_backends(settings)) as gateway:
        for _ in range(5):
            assert (await gateway.chat(model="near")).status_code == 200
        assert gateway.parts.lease.num_writes == 0
        for _ in range(20):
            assert (await gateway.chat(model="far", max_tokens=5)).status_code == 200
        assert gateway.parts.lease.num_writes < 5, "not one a request"
    assert counting.num_calls == 20


async def test_an_installation_without_remote_prices_has_no_lease(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        assert gateway.parts.lease is None
        assert (await gateway.chat()).status_code == 200


async def test_nothing_is_asked_for_that_the_database_does_not_cover(
    tmp_path: Path, provider: tuple[CountingProvider, str]
) -> None:
    counting, url = provider
    settings = settings_of(tmp_path, url, database__busy_timeout_s=0.1)
    async with running(settings, make_backends(settings)) as gateway:
        holder = sqlite3.connect(settings.database.url.removeprefix("sqlite:///"), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        assert_error(await gateway.chat(model="far"), 503, "log_unavailable")
        assert counting.num_calls == 0
        holder.execute("ROLLBACK")
        holder.close()
        assert (await gateway.chat(model="far")).status_code == 200
        assert gateway.parts.lease.held_nano_usd == 0


async def spending_alerts(url: str) -> list[Alert]:
    async with Store(StoreConfig(url=url)) as store:
        return [each for each in await ControlStore(store).list_alerts() if each.kind == "spending"]


@pytest.mark.slow
async def test_a_killed_server_is_reported_with_what_it_may_have_spent(
    tmp_path: Path, database_url: str, provider: tuple[CountingProvider, str]
) -> None:
    counting, url = provider
    config = tmp_path / "suffice.toml"
    config.write_text(_TOML.format(url=url) + f'\n[database]\nurl = "{database_url}"\n')
    port, log = free_port(), tmp_path / "second.log"

    async def hang(client: httpx.AsyncClient, **body: Any) -> None:
        asked = {"model": "far", "messages": [{"role": "user", "content": "hang"}], "max_tokens": MAX_TOKENS}
        with pytest.raises(httpx.HTTPError):
            await client.post("/v1/chat/completions", json=asked | body, timeout=120)

    async with gateway_process(config, port, tmp_path / "first.log") as server:
        for _ in range(3):
            assert (await server.chat(model="far", max_tokens=MAX_TOKENS)).status_code == 200
        under_way = [asyncio.create_task(hang(server.client, stream=place % 2 == 0, n=2)) for place in range(4)]
        await until(lambda: counting.num_calls == 3 + 8)
        server.kill()
        await asyncio.gather(*under_way)
        await server.process.wait()

    async with gateway_process(config, port, log) as server:
        await until(lambda: b"did not end in order" in log.read_bytes())
        (alert,) = await spending_alerts(database_url)
        async with Store(StoreConfig(url=database_url)) as store:
            logged = sum(to_nano_usd(row.cost_usd) for row in await store.recent(limit=100))
        unlogged_usd = from_nano_usd(counting.billed_nano_usd - logged)
        assert unlogged_usd > 0
        assert float(alert.body["amount_usd"]) >= float(unlogged_usd)
        assert alert.body["amount_usd"] in alert.body["problem"]
        shown = (await server.client.get("/metrics")).text
        assert f"suffice_unlogged_spending_usd_total {float(alert.body['amount_usd'])}" in shown
        # One that ends in order leaves nothing to report.
        assert (await server.chat(model="far", max_tokens=MAX_TOKENS)).status_code == 200
    async with gateway_process(config, port, tmp_path / "third.log"):
        pass
    assert len(await spending_alerts(database_url)) == 1


@pytest.mark.slow
@pytest.mark.db
async def test_two_living_servers_do_not_report_each_other(
    tmp_path: Path, postgres_url: str, provider: tuple[CountingProvider, str]
) -> None:
    counting, url = provider
    config = tmp_path / "suffice.toml"
    config.write_text(_TOML.format(url=url) + f'\n[database]\nurl = "{postgres_url}"\n')
    async with (
        gateway_process(config, free_port(), tmp_path / "a.log") as first,
        gateway_process(config, free_port(), tmp_path / "b.log") as second,
    ):
        asked = {"model": "far", "messages": [{"role": "user", "content": "hang"}], "max_tokens": MAX_TOKENS}
        tasks = [
            asyncio.create_task(each.client.post("/v1/chat/completions", json=asked, timeout=120))
            for each in (first, second)
        ]
        await until(lambda: counting.num_calls == 2)
        # Longer than a lease runs that nobody renews.
        await asyncio.sleep(5)
        assert await spending_alerts(postgres_url) == []
        first.kill()
        await first.process.wait()
        await until(lambda: b"did not end in order" in (tmp_path / "b.log").read_bytes())
        (alert,) = await spending_alerts(postgres_url)
        assert f":{first.process.pid}" in alert.subject
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
