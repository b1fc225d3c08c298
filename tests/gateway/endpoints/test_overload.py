"""Too much to do, over HTTP: places, queue, fairness, drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from backends.protocol import Backend, Load, Priority
from backends.testing import EchoBackend, Script
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running
from tests.gateway.raw import RawClient, eventually


def gated_backends(gate: asyncio.Event) -> dict[str, Backend]:
    """The ladder's models; both begin to answer when the test says so."""

    async def until_open(_: float) -> None:
        await gate.wait()

    return echo_backends(large=Script(text="a b", first_delay_s=1.0), sleep=until_open)


async def fill(gateway: Gateway, clients: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(gateway.chat("hi", model="expert")) for _ in range(clients)]


async def test_a_full_queue_is_told_at_once_and_the_rest_is_served(tmp_path: Path) -> None:
    gate = asyncio.Event()
    configured = make_settings(tmp_path, server__max_concurrency=2, server__queue_limit=3)
    async with running(configured, gated_backends(gate)) as gateway:
        asking = await fill(gateway, 12)
        await eventually(lambda: sum(task.done() for task in asking) == 7)
        gate.set()
        responses = await asyncio.gather(*asking)
        served = [each for each in responses if each.status_code == 200]
        refused = [each for each in responses if each.status_code != 200]
        assert len(served) == 5
        for each in refused:
            assert_error(each, 429, "rate_limit_exceeded")
        assert len(await gateway.rows()) == 5
        metrics = (await gateway.client.get("/metrics")).text
        assert 'suffice_rejected_total{code="rate_limit_exceeded",endpoint="/v1/chat/completions"} 7.0' in metrics
        gateway.assert_idle()


async def make_key(gateway: Gateway, tenant: str, limits: dict[str, Any] | None = None) -> dict[str, str]:
    """Headers of a new key."""
    body = {"name": tenant, "tenant": tenant, "limits": limits or {}}
    made = (await gateway.client.post("/admin/v1/keys", json=body)).json()
    return {"authorization": f"Bearer {made['key']}"}


async def test_a_greedy_tenant_leaves_room_for_others(tmp_path: Path) -> None:
    """One key held all places and the whole queue, and everybody else got 429 (security review M8)."""
    backends = echo_backends(large=Script(text="a b", first_delay_s=0.2))
    configured = make_settings(tmp_path, server__max_concurrency=2, server__queue_limit=3)
    async with running(configured, backends) as gateway:
        greedy, modest = await make_key(gateway, "greedy"), await make_key(gateway, "modest")
        asked = {"model": "expert", "messages": [{"role": "user", "content": "hi"}]}

        async def ask(headers: dict[str, str]) -> int:
            return (await gateway.client.post("/v1/chat/completions", json=asked, headers=headers)).status_code

        many = [asyncio.create_task(ask(greedy)) for _ in range(8)]
        await eventually(lambda: gateway.parts.admission.num_waiting == 3)
        assert await ask(modest) == 200
        statuses = [await each for each in many]
        assert statuses.count(200) == 4, "two at once and three in the queue, of which the newest gave way"
        assert statuses.count(429) == 4
        assert {row.tenant for row in await gateway.rows()} == {"greedy", "modest"}
        gateway.assert_idle()


async def test_a_key_has_no_more_requests_at_once_than_it_may(tmp_path: Path) -> None:
    """(security review M8)."""
    backends = echo_backends(large=Script(text="a b", first_delay_s=0.1))
    async with running(make_settings(tmp_path), backends) as gateway:
        limited = await make_key(gateway, "a", {"max_concurrency": 2})
        large, most = backends["large"], 0
        assert isinstance(large, EchoBackend)
        asked = {"model": "expert", "messages": [{"role": "user", "content": "hi"}]}
        posts = [gateway.client.post("/v1/chat/completions", json=asked, headers=limited) for _ in range(6)]
        tasks = [asyncio.create_task(post) for post in posts]  # type: ignore[arg-type]
        while not all(task.done() for task in tasks):
            most = max(most, large.num_running)
            await asyncio.sleep(0.005)
        assert most == 2
        assert {task.result().status_code for task in tasks} == {200}
        gateway.assert_idle()


async def test_a_model_that_hangs_holds_up_only_those_who_want_it(tmp_path: Path) -> None:
    class Narrow(EchoBackend):
        def load(self) -> Load:
            return Load(running=self.num_running, max_running=1)

    backends = {"small": EchoBackend("small"), "large": Narrow("large", Script(hang_after=0))}
    configured = make_settings(tmp_path, server__request_timeout_s=2, server__queue_limit=1)
    async with running(configured, backends) as gateway:
        hung = await fill(gateway, 2)
        await eventually(lambda: gateway.parts.admission.num_waiting == 1)
        assert_error(await gateway.chat("hi", model="expert"), 429, "rate_limit_exceeded")
        assert (await gateway.chat("hi", model="simple")).status_code == 200
        await asyncio.gather(*hung)
        assert len(await gateway.rows()) == 2 + 1, "what was turned away has no row"
        gateway.assert_idle()


async def test_a_kill_switch_reaches_those_who_wait(tmp_path: Path) -> None:
    """They were routed when they came, and the switch is for all traffic."""
    backends = echo_backends(small=Script(text="a", first_delay_s=0.2))
    configured = make_settings(tmp_path, server__max_concurrency=1)
    async with running(configured, backends) as gateway:
        gateway.parts.request_router.kill_switch = False
        held = await gateway.parts.admission.enter(Priority.LIVE)
        waiting = asyncio.create_task(gateway.chat("hi", suffice={"max_tier": 1}))
        free = asyncio.create_task(gateway.chat("hi"))
        await eventually(lambda: gateway.parts.admission.num_waiting == 2)
        gateway.parts.request_router.kill_switch = True
        gateway.parts.admission.leave(held)
        assert (await free).headers["x-suffice-reason"] == "kill_switch"
        await waiting
        gateway.assert_idle()


async def test_a_client_that_leaves_the_queue_is_not_served(tmp_path: Path) -> None:
    gate = asyncio.Event()
    backends = gated_backends(gate)
    async with running(make_settings(tmp_path, server__max_concurrency=1), backends) as gateway:
        first = (await fill(gateway, 1))[0]
        large = backends["large"]
        assert isinstance(large, EchoBackend)
        await eventually(lambda: large.num_running == 1)
        async with RawClient(gateway.url) as client:
            await client.post(
                "/v1/chat/completions", {"model": "expert", "messages": [{"role": "user", "content": "x"}]}
            )
            await eventually(lambda: gateway.parts.admission.num_waiting == 1)
        await eventually(lambda: gateway.parts.admission.num_waiting == 0)
        gate.set()
        assert (await first).status_code == 200
        assert len(large.requests) == 1
        gateway.assert_idle()


async def test_stopping_lets_running_answers_finish(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a b c d e", token_delay_s=0.05))
    async with running(make_settings(tmp_path), backends) as gateway:
        async with gateway.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "expert", "stream": True, "messages": [{"role": "user", "content": "x"}]},
        ) as response:
            lines = response.aiter_lines()
            await anext(lines)
            gateway.app.state.server.should_exit = True
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        large = backends["large"]
        assert isinstance(large, EchoBackend)
        assert large.num_finished == 1


async def test_an_answer_longer_than_the_drain_is_cut_and_billed(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="word " * 10_000, token_delay_s=0.01))
    configured = make_settings(tmp_path, server__drain_timeout_s=1)
    async with running(configured, backends) as gateway:
        store = gateway.parts.store
        async with gateway.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "expert", "stream": True, "messages": [{"role": "user", "content": "x"}]},
        ) as response:
            lines = response.aiter_lines()
            await anext(lines)
            gateway.app.state.server.should_exit = True
            rest = [line async for line in lines]
        assert "data: [DONE]" not in rest
        assert '"shutting_down"' in rest[-2]
    await store.open()
    try:
        (row,) = await store.recent()
        assert row.finish_reason == "cancelled"
        assert row.completion_tokens > 0
    finally:
        await store.close()
