"""The remote backend against a real server that behaves, and misbehaves, by name.

Each fault is an ordinary case with the same questions: one ending, the right one, nothing left open, and the next good
request served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from backends.config import BreakerConfig, RemoteModelConfig, RetryConfig, TimeoutConfig
from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendTimeout,
    BackendUnavailable,
    ContextLengthExceeded,
    RequestRejected,
    UnsupportedByBackend,
)
from backends.protocol import Finished, FinishReason, GenerateRequest, Message, SamplingParams, TokenDelta
from backends.provider.behaviours import BEHAVIOURS
from backends.provider.server import ProviderServer
from backends.remote.openai import OpenAIBackend
from backends.testing import Script, split_tokens

ANSWER = "The naïve 🦊 says: 2 + 2 = 4, 不是 5."
TIMEOUTS = TimeoutConfig(connect_s=2, first_token_s=0.4, gap_s=0.25, trailer_s=0.2, health_s=0.5)
QUICK = RetryConfig(max_attempts=3, base_s=0.001, max_s=0.5)
ONCE = RetryConfig(max_attempts=1)
EVERYTHING = ("generate", "logprobs", "thinking", "embed", "score", "tokenize", "prompt_token_ids")


@pytest.fixture(scope="module")
def server() -> Iterator[ProviderServer]:
    with ProviderServer(Script(text=ANSWER)) as running:
        yield running
        assert running.errors == []


@pytest.fixture(params=["httpx", "aiohttp"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "aiohttp":
        pytest.importorskip("aiohttp")
    return str(request.param)


def make(server: ProviderServer, *behaviours: str, **options: Any) -> OpenAIBackend:
    api_key = options.pop("api_key", None)
    sleep = options.pop("sleep", asyncio.sleep)
    fields: dict[str, Any] = {"timeouts": TIMEOUTS, "retry": QUICK, "capabilities": EVERYTHING, "score_api": "vllm"}
    urls = tuple(server.url(behaviour) for behaviour in behaviours)
    config = RemoteModelConfig(urls=urls, model="provider-model", **{**fields, **options})
    return OpenAIBackend("far", config, api_key=api_key, rng=Random(7), sleep=sleep)


def chat(text: str = "What is 2 + 2?", **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", messages=(Message("user", text),), sampling=SamplingParams(**sampling))


async def collect(backend: OpenAIBackend, request: GenerateRequest) -> tuple[list[TokenDelta], Finished]:
    events = [event async for event in backend.generate(request)]
    endings = [event for event in events if isinstance(event, Finished)]
    assert len(endings) == 1
    assert events[-1] is endings[0]
    assert backend.load().running == 0
    return [event for event in events if isinstance(event, TokenDelta)], endings[0]


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that happens on the server's thread."""
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110 - another loop's doing, so no event of this one
            await asyncio.sleep(0.005)


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.fixture
async def opened() -> AsyncIterator[list[OpenAIBackend]]:
    """Backends put in here are closed at the end."""
    backends: list[OpenAIBackend] = []
    yield backends
    for backend in backends:
        await backend.close()


WHOLE = [
    "ok",
    "slow",
    "torn_sse",
    "one_write",
    "crlf",
    "comments",
    "not_streamed",
    "no_done",
    "after_done",
    "no_usage",
    "no_stream_options",
    "usage_never",
    "two_endings",
    "ignores_stop",
]


@pytest.mark.parametrize("behaviour", WHOLE)
async def test_an_odd_but_whole_answer_is_whole(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, transport=transport)
    opened.append(backend)
    for request in (chat(), GenerateRequest("r", prompt="2 + 2 =")):
        deltas, ending = await collect(backend, request)
        assert text_of(deltas) == ANSWER
        assert (ending.reason, ending.error) == (FinishReason.STOP, None)
        assert ending.usage.completion_tokens == len(split_tokens(ANSWER))
        assert ending.usage_estimated == (behaviour in ("no_usage", "usage_never", "no_stream_options"))
        assert ending.usage.prompt_tokens > 0
        assert 0 < ending.timings.ttft_s <= ending.timings.total_s
    assert await server.settled()


BEFORE = {
    "400": RequestRejected,
    "401": BackendUnavailable,
    "404": BackendUnavailable,
    "422": RequestRejected,
    "429": BackendOverloaded,
    "429_for_an_hour": BackendOverloaded,
    "500": BackendFailure,
    "503": BackendUnavailable,
    "503_for_an_hour": BackendUnavailable,
    "529": BackendOverloaded,
    "context_openai": ContextLengthExceeded,
    "context_vllm": ContextLengthExceeded,
    "context_llamacpp": ContextLengthExceeded,
    "redirect": BackendFailure,
    "html": BackendFailure,
    "html_502": BackendFailure,
    "json_error_200": BackendFailure,
    "empty_body": BackendFailure,
    "empty_stream": BackendFailure,
    "error_event": BackendFailure,
    "malformed_json": BackendFailure,
    "wrong_types": BackendFailure,
    "huge_line": BackendFailure,
    "hang": BackendTimeout,
    "hang_after_head": BackendTimeout,
    "pings_forever": BackendTimeout,
    "reset_before_head": BackendFailure,
    "reset_after_head": BackendFailure,
}


@pytest.mark.parametrize("behaviour", BEFORE)
async def test_a_failure_before_the_first_token_raises_its_type(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, retry=ONCE, transport=transport)
    opened.append(backend)
    with pytest.raises(BackendError) as caught:
        await collect(backend, chat())
    assert type(caught.value) is BEFORE[behaviour], caught.value
    assert backend.load().running == 0
    assert await server.settled(), "the server still answers a request nobody waits for"


AFTER = {
    "reset_after_3_tokens": "connection lost",
    "close_after_3_tokens": "in the middle",
    "done_after_3_tokens": "in the middle",
    "cut_after_3_tokens": "expected JSON",
    "stall_after_3_tokens": "no token in 0.25 s",
    "ping_after_3_tokens": "no token in",
    "error_after_3_tokens": "engine died",
    "malformed_after_3_tokens": "expected JSON",
    "unknown_reason": "'abort'",
}


@pytest.mark.parametrize("behaviour", AFTER)
async def test_a_failure_after_the_first_token_ends_with_an_error_once(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, transport=transport)
    opened.append(backend)
    before = server.count(behaviour)
    deltas, ending = await collect(backend, chat())
    assert ending.reason is FinishReason.ERROR
    assert ending.error is not None
    assert AFTER[behaviour] in ending.error
    if behaviour != "unknown_reason":
        assert text_of(deltas) == "The naïve 🦊"
        assert (ending.usage.completion_tokens, ending.usage_estimated) == (3, True)
    assert server.count(behaviour) == before + 1, "an answer that has begun is not begun again"
    assert await server.settled()


def test_every_behaviour_is_in_a_test() -> None:
    assert set(BEHAVIOURS) == {*WHOLE, *BEFORE, *AFTER, "slow_tokens", "flaky"}


# --- what is sent ----------------------------------------------------------------------------------------------------


async def test_options_travel_by_the_fields_names(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "ok", extra_body={"service_tier": "flex"}, extra_headers={"x-team": "a"}, api_key="sk-1")
    opened.append(backend)
    request = replace(
        chat(temperature=0.5, top_k=3, stop=("zzz",), seed=7, logit_bias={5: -1.0}, logprobs=2, max_tokens=50),
        thinking=True,
    )
    await collect(backend, request)
    seen = server.requests[-1]
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == "Bearer sk-1"
    assert seen.headers["x-team"] == "a"
    assert seen.body == {
        "model": "provider-model",
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_k": 3,
        "seed": 7,
        "max_tokens": 50,
        "stop": ["zzz"],
        "logit_bias": {"5": -1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": True},
        "service_tier": "flex",
    }


async def test_servers_own_names_for_limits_and_thinking(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    names: dict[str, Any] = {"thinking_parameter": "reasoning_effort", "max_tokens_parameter": "max_completion_tokens"}
    backend = make(server, "ok", thinking=False, **names)
    opened.append(backend)
    await collect(backend, chat(max_tokens=5))
    body = server.requests[-1].body
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (5, "none")
    assert "max_tokens" not in body


async def test_what_a_server_was_not_said_to_offer_is_refused_unasked(server: ProviderServer) -> None:
    backend = make(server, "ok", capabilities=("generate",), score_api="none")
    before = len(server.requests)
    refused = {
        "logprobs": chat(logprobs=1),
        "thinking": replace(chat(), thinking=True),
        "prompt_token_ids": GenerateRequest("r", prompt_token_ids=(1, 2)),
        "prompt_logprobs": chat(prompt_logprobs=0),
        "echo": replace(chat(), echo=True),
    }
    for option, request in refused.items():
        with pytest.raises(UnsupportedByBackend) as caught:
            await collect(backend, request)
        assert caught.value.option == option
    with pytest.raises(UnsupportedByBackend):
        await backend.embed(["a"])
    with pytest.raises(UnsupportedByBackend):
        await backend.score(chat(), "a")
    assert await backend.count_tokens(chat()) is None
    assert len(server.requests) == before


async def test_logprobs_of_both_apis_read_the_same(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "ok")
    opened.append(backend)
    found = []
    for request in (chat(logprobs=2), GenerateRequest("r", prompt="x", sampling=SamplingParams(logprobs=2))):
        deltas, ending = await collect(backend, request)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert "".join(entry.token for entry in entries) == ANSWER
        assert sum(delta.num_tokens for delta in deltas) == ending.usage.completion_tokens == len(entries)
        assert all(len(entry.top) == 2 for entry in entries)
        found.append(entries)
    assert found[0] == found[1]


@pytest.mark.parametrize("behaviour", ["ignores_stop", "ok"])
async def test_stop_strings_are_kept_whatever_the_server_does(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, transport=transport)
    opened.append(backend)
    for stop in ("ïve 🦊 s", "2", " 不", ANSWER[-1], "T", ANSWER, "never"):
        deltas, ending = await collect(backend, chat(stop=("a", "b", "c", "d", stop)[-1:]))
        assert text_of(deltas) == ANSWER.partition(stop)[0]
        assert (ending.reason, ending.error) == (FinishReason.STOP, None)
    many = chat(stop=(*(f"never {number}" for number in range(9)), "says"))
    deltas, ending = await collect(backend, many)
    assert text_of(deltas) == ANSWER.partition("says")[0]
    assert len(server.requests[-1].body.get("stop", [None] * 4)) == 4
    assert await server.settled()


async def test_reasoning_arrives_apart_and_is_counted(opened: list[OpenAIBackend]) -> None:
    with ProviderServer(Script(text="4", reasoning="2 and 2", cached_tokens=3)) as server:
        for behaviour in ("ok", "not_streamed", "one_write"):
            backend = make(server, behaviour)
            opened.append(backend)
            deltas, ending = await collect(backend, replace(chat(), thinking=True))
            assert ("".join(delta.reasoning for delta in deltas), text_of(deltas)) == ("2 and 2", "4")
            assert (ending.usage.reasoning_tokens, ending.usage.completion_tokens) == (3, 4)
            assert ending.usage.cached_tokens == 3


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
    backend = make(server, broken, "ok")
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
    with pytest.raises(BackendUnavailable) as resting:
        await collect(backend, chat())
    assert resting.value.retry_after_s == pytest.approx(3600, abs=10)
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
        await asyncio.gather(*(_drain(backend, chat()) for _ in range(8)))
        assert server.count("slow_tokens") - before == other.count("slow_tokens") == 4
    assert all(replica.work == 0 == replica.num_outstanding for replica in backend.replicas.replicas)


async def _drain(backend: OpenAIBackend, request: GenerateRequest) -> None:
    async for _ in backend.generate(request):
        pass


async def test_full_replicas_refuse(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "slow_tokens", max_outstanding=1)
    opened.append(backend)
    async with aclosing(backend.generate(chat())) as events:
        await anext(events)
        with pytest.raises(BackendOverloaded, match="1 requests in flight"):
            await collect_raw(backend)


async def collect_raw(backend: OpenAIBackend) -> list[object]:
    return [event async for event in backend.generate(chat())]


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
    task = asyncio.create_task(_drain(backend, replace(chat(), on_abandoned=bills.append)))
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
    task = asyncio.create_task(_drain(backend, chat()))
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


# --- secrets ---------------------------------------------------------------------------------------------------------


async def test_the_key_stays_out_of_messages_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-very-secret-key"
    with ProviderServer(api_key="another") as server:
        for behaviour in ("ok", "401", "500"):
            backend = make(server, behaviour, api_key=key, retry=ONCE)
            with pytest.raises(BackendError) as caught:
                await collect(backend, chat())
            assert key not in str(caught.value) + repr(caught.value)
            assert key not in (await backend.health()).detail
            await backend.close()
    assert key not in caplog.text


# --- other calls -----------------------------------------------------------------------------------------------------


async def test_embeddings_come_in_order_and_unit_length(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "ok")
    opened.append(backend)
    result = await backend.embed(["a b", "c"])
    again = await backend.embed(["c"])
    assert len(result.vectors) == 2
    assert result.vectors[1] == again.vectors[0]
    assert all(sum(x * x for x in vector) == pytest.approx(1) for vector in result.vectors)
    assert result.usage.prompt_tokens == 3
    broken = make(server, "500", retry=ONCE)
    opened.append(broken)
    with pytest.raises(BackendFailure):
        await broken.embed(["a"])


async def test_tokens_are_counted_by_the_server(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "ok")
    opened.append(backend)
    assert await backend.count_tokens(chat("a b c")) == 3
    assert await backend.count_tokens(GenerateRequest("r", prompt="a b")) == 2
    assert await backend.count_tokens(GenerateRequest("r", prompt_token_ids=(1, 2, 3, 4))) == 4


@pytest.mark.parametrize("score_api", ["vllm", "echo"])
async def test_scoring_reads_only_the_answer(
    server: ProviderServer, score_api: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, "ok", score_api=score_api)
    opened.append(backend)
    result = await backend.score(GenerateRequest("r", prompt="one two"), " three four")
    assert result.logprobs == (-0.5, -0.5)
    assert len(result.ranks) == len(result.token_ids) == 2
    if score_api == "vllm":
        chatted = await backend.score(chat("one two"), "three four")
        assert (len(chatted.logprobs), chatted.token_ids[1]) == (2, result.token_ids[1])
        body = server.requests[-1].body
        assert (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)
        assert body["messages"][-1] == {"role": "assistant", "content": "three four"}
    else:
        with pytest.raises(UnsupportedByBackend):
            await backend.score(chat(), "three")


async def test_health_names_the_replica_that_is_down(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    backend = make(server, "ok", "hang", "500")
    opened.append(backend)
    health = await backend.health()
    assert health.ok
    assert health.latency_s > 0
    assert server.url("hang") in health.detail
    assert server.url("500") in health.detail
    assert server.url("ok") + ":" not in health.detail
    assert server.requests[-1].body["max_tokens"] == 1
    down = make(server, "empty_stream")
    opened.append(down)
    assert not (await down.health()).ok
