"""Retries, replicas and breakers; leaving early and closing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from backends.config import BreakerConfig, RemoteModelConfig, RetryConfig, TimeoutConfig
from backends.errors import (
    BackendOverloaded,
    BackendUnavailable,
    RequestRejected,
)
from backends.protocol import Finished, FinishReason, TokenDelta
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import Script
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import (
    ANSWER,
    HASTY,
    ONCE,
    chat,
    collect,
    drain,
    make,
    text_of,
    until,
)

# --- retries, replicas, breakers -------------------------------------------------------------------------------------


async def test_a_flaky_server_is_retried_with_waits_under_their_caps(server: ProviderServer) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    retry = RetryConfig(max_attempts=3, base_s=0.1, max_s=5)
    backend = make(server, "flaky", retry=retry, sleep=sleep, breaker=BreakerConfig(failure_threshold=9))
    deltas, ending = await collect(backend, chat())
    assert (text_of(deltas), ending.reason) == (ANSWER, FinishReason.STOP)
    assert len(waits) == 2
    assert 0 <= waits[0] <= 0.1
    assert 0 <= waits[1] <= 0.2
    await backend.close()


@pytest.mark.parametrize(
    "broken", ["500", "hang", "reset_before_head", "empty_stream", "malformed_json", "429_for_an_hour"]
)
async def test_another_replica_takes_over_before_the_first_token(
    server: ProviderServer, broken: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, broken, "ok", timeouts=HASTY)
    opened.append(backend)
    for _ in range(2):  # whichever is asked first
        deltas, ending = await collect(backend, chat())
        assert (text_of(deltas), ending.reason) == (ANSWER, FinishReason.STOP)


async def test_a_long_retry_after_is_told_not_waited_for(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "429_for_an_hour")
    opened.append(backend)
    before = server.count("429_for_an_hour")
    with pytest.raises(BackendOverloaded) as caught:
        await collect(backend, chat())
    assert caught.value.retry_after_s == 3600
    # Not gone for all others on the word of one answer (security review L9).
    (replica,) = backend.replicas.replicas
    assert replica.num_rests == 1
    assert replica.wait_s(backend._clock()) <= 1.0
    # While it rests it is not asked; made longer here, for slow machines.
    replica.rest(backend._clock() + 1000.0)
    with pytest.raises(BackendUnavailable):
        await collect(backend, chat())
    assert server.count("429_for_an_hour") == before + 1, "a server that asked for rest was asked again"


async def test_the_callers_mistake_is_not_retried_and_breaks_nothing(
    server: ProviderServer, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, "400", breaker=BreakerConfig(failure_threshold=1))
    opened.append(backend)
    for attempt in range(3):
        before = server.count("400")
        with pytest.raises(RequestRejected) as caught:
            await collect(backend, chat())
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, "temperature", "invalid_value")
        assert server.count("400") == before + 1, attempt


async def test_an_open_breaker_spares_the_server_until_a_health_check_closes_it(
    server: ProviderServer, opened: list[OpenAIBackend]
) -> None:
    breaker = BreakerConfig(failure_threshold=2, open_s=1000, max_open_s=1000)
    backend = make(server, "flaky", retry=ONCE, breaker=breaker)
    opened.append(backend)
    while server.count("flaky") % 3:
        server.requests.append(server.requests[-1])
    for _ in range(2):
        with pytest.raises(BackendUnavailable):
            await collect(backend, chat())
    before = server.count("flaky")
    with pytest.raises(BackendUnavailable, match="No replica"):
        await collect(backend, chat())
    assert server.count("flaky") == before
    assert (await backend.health()).ok
    _, ending = await collect(backend, chat()) if server.count("flaky") % 3 == 2 else (None, None)
    assert backend.replicas.replicas[0].breaker.state(0.0) == "closed"
    assert ending is None or ending.reason is FinishReason.STOP


async def test_a_server_that_always_breaks_off_opens_its_breaker(
    server: ProviderServer, opened: list[OpenAIBackend]
) -> None:
    backend = make(
        server, "close_after_3_tokens", breaker=BreakerConfig(failure_threshold=2, open_s=1000, max_open_s=1000)
    )
    opened.append(backend)
    for _ in range(2):
        _, ending = await collect(backend, chat())
        assert ending.reason is FinishReason.ERROR
    with pytest.raises(BackendUnavailable, match="No replica"):
        await collect(backend, chat())


async def test_nobody_at_the_door(opened: list[OpenAIBackend], transport: str, server: ProviderServer) -> None:
    config = RemoteModelConfig(urls=("http://127.0.0.1:9/v1",), model="m", retry=ONCE, transport=transport)  # type: ignore[arg-type]
    backend = OpenAIBackend("far", config)
    opened.append(backend)
    with pytest.raises(BackendUnavailable, match="cannot connect"):
        await collect(backend, chat())
    health = await backend.health()
    assert not health.ok
    assert "127.0.0.1:9" in health.detail


async def test_load_is_spread_by_outstanding_work(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    with ProviderServer(Script(text=ANSWER)) as other:
        config = RemoteModelConfig(urls=(server.url("slow_tokens"), other.url("slow_tokens")), model="provider-model")
        backend = OpenAIBackend("far", config)
        opened.append(backend)
        before = server.count("slow_tokens")
        await asyncio.gather(*(drain(backend, chat()) for _ in range(8)))
        assert server.count("slow_tokens") - before == other.count("slow_tokens") == 4
    assert all(replica.work == 0 == replica.num_outstanding for replica in backend.replicas.replicas)


async def test_full_replicas_refuse(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "slow_tokens", max_outstanding=1)
    opened.append(backend)
    async with aclosing(backend.generate(chat())) as events:
        await anext(events)
        with pytest.raises(BackendOverloaded, match="1 requests in flight"):
            await drain(backend, chat())


# --- cancelling and closing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["slow_tokens", "stall_after_3_tokens"])
async def test_leaving_closes_the_connection_and_tells_the_bill(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, transport=transport, timeouts=TimeoutConfig())
    opened.append(backend)
    bills: list[Finished] = []
    gone = server.num_gone
    seen: list[TokenDelta] = []
    async with aclosing(backend.generate(replace(chat(), on_abandoned=bills.append))) as events:
        async for event in events:
            assert isinstance(event, TokenDelta)
            seen.append(event)
            if sum(delta.num_tokens for delta in seen) >= 2:
                break
    assert await server.settled()
    assert server.num_gone == gone + 1 if behaviour.startswith("stall") else server.num_active == 0
    assert [bill.reason for bill in bills] == [FinishReason.CANCELLED]
    assert bills[0].usage.completion_tokens == sum(delta.num_tokens for delta in seen)
    assert backend.load().running == 0


@pytest.mark.parametrize("behaviour", ["hang", "hang_after_head", "stall_after_3_tokens"])
async def test_cancelling_the_task_closes_the_connection(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, transport=transport, timeouts=TimeoutConfig())
    opened.append(backend)
    bills: list[Finished] = []
    before, gone = server.count(behaviour), server.num_gone
    task = asyncio.create_task(drain(backend, replace(chat(), on_abandoned=bills.append)))
    await until(lambda: server.count(behaviour) > before)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await server.settled()
    assert server.num_gone == gone + 1
    assert (len(bills), backend.load().running) == (1, 0)


async def test_closing_ends_what_runs_and_refuses_what_comes(server: ProviderServer, transport: str) -> None:
    backend = make(server, "stall_after_3_tokens", transport=transport, timeouts=TimeoutConfig())
    events: list[object] = []

    async def consume() -> None:
        async for event in backend.generate(chat()):
            events.append(event)

    task = asyncio.create_task(consume())
    await until(lambda: bool(events))
    await backend.close()
    await backend.close()
    await task
    ending = events[-1]
    assert isinstance(ending, Finished)
    assert ending.reason is FinishReason.CANCELLED
    assert not (await backend.health()).ok
    with pytest.raises(BackendUnavailable, match="closed"):
        await collect(backend, chat())
    assert await server.settled()


async def test_closing_before_the_first_token_raises(server: ProviderServer, transport: str) -> None:
    backend = make(server, "hang", transport=transport, timeouts=TimeoutConfig())
    before = server.count("hang")
    task = asyncio.create_task(drain(backend, chat()))
    await until(lambda: server.count("hang") > before)
    await backend.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        await task
    assert await server.settled()


async def test_connections_are_reused(server: ProviderServer, transport: str, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "ok", transport=transport)
    opened.append(backend)
    await collect(backend, chat())
    await asyncio.sleep(0.05)
    before = server.connections()
    for _ in range(5):
        await collect(backend, chat())
    assert server.connections() == before
