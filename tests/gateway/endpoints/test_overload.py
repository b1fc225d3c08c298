"""Admission: places, queue, priorities, drain; as a machine beside a model, and over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import Priority
from backends.testing import EchoBackend, Script
from gateway.access.admission import Admission
from gateway.errors import Draining, QueueFull
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running
from tests.gateway.raw import RawClient, eventually

operations = st.lists(st.sampled_from(["live", "background", "leave", "cancel"]), max_size=40)


@given(operations, st.integers(1, 3), st.integers(0, 4))
async def test_places_are_bounded_and_live_goes_first(steps: list[str], max_running: int, max_waiting: int) -> None:
    admission = Admission(max_running, max_waiting)
    running: list[asyncio.Task[None]] = []
    waiting: dict[str, list[asyncio.Task[None]]] = {"live": [], "background": []}

    async def settle() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for queue in waiting.values():
            for task in [task for task in queue if task.done()]:
                queue.remove(task)
                if not task.cancelled() and task.exception() is None:
                    running.append(task)

    for step in steps:
        if step in waiting:
            waiting[step].append(asyncio.create_task(admission.enter(Priority(step))))
        elif step == "leave" and running:
            had_live = bool(waiting["live"])
            background = list(waiting["background"])
            running.pop()
            admission.leave(0.1)
            await settle()
            if had_live:
                assert waiting["background"] == background, "background work overtook a live request"
        elif step == "cancel" and (queue := waiting["live"] or waiting["background"]):
            queue[0].cancel()
        await settle()
        assert admission.num_running == len(running) <= max_running
        assert admission.num_waiting == len(waiting["live"]) + len(waiting["background"]) <= max_waiting
        if admission.num_waiting:
            assert admission.num_running == max_running, "someone waits beside a free place"
    for queue in waiting.values():
        for task in queue:
            task.cancel()
    await asyncio.gather(*waiting["live"], *waiting["background"], return_exceptions=True)
    assert admission.num_waiting == 0


async def test_a_live_request_takes_the_place_of_the_newest_background_one_in_the_queue() -> None:
    admission = Admission(1, 1)
    await admission.enter(Priority.LIVE)
    background = asyncio.create_task(admission.enter(Priority.BACKGROUND))
    await asyncio.sleep(0)
    live = asyncio.create_task(admission.enter(Priority.LIVE))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await background
    with pytest.raises(QueueFull):
        await admission.enter(Priority.BACKGROUND)
    with pytest.raises(QueueFull):
        await admission.enter(Priority.LIVE)
    admission.leave(0.0)
    await live


async def test_draining_sends_the_waiting_away_and_waits_for_the_running() -> None:
    admission = Admission(1, 5)
    await admission.enter(Priority.LIVE)
    waiting = asyncio.create_task(admission.enter(Priority.LIVE))
    await asyncio.sleep(0)
    assert not await admission.drain(0.01)
    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await admission.enter(Priority.LIVE)
    admission.leave(0.0)
    assert await admission.drain(1.0)


async def fill(gateway: Gateway, clients: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(gateway.chat("hi", model="expert")) for _ in range(clients)]


async def test_a_full_queue_is_told_at_once_and_the_rest_is_served(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a b", first_delay_s=0.3))
    configured = make_settings(tmp_path, server__max_concurrency=2, server__queue_limit=3)
    async with running(configured, backends) as gateway:
        responses = await asyncio.gather(*await fill(gateway, 12))
        served = [each for each in responses if each.status_code == 200]
        refused = [each for each in responses if each.status_code != 200]
        assert len(served) == 5
        for each in refused:
            assert_error(each, 429, "rate_limit_exceeded")
        assert len(await gateway.rows()) == 5
        metrics = (await gateway.client.get("/metrics")).text
        assert 'suffice_rejected_total{code="rate_limit_exceeded",endpoint="/v1/chat/completions"} 7.0' in metrics
        gateway.assert_idle()


async def test_a_client_that_leaves_the_queue_is_not_served(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a", first_delay_s=0.3))
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
