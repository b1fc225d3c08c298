"""The remote backend sends what was asked, and reads what comes back."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from backends.errors import (
    BackendError,
    BackendFailure,
    UnsupportedByBackend,
)
from backends.protocol import FinishReason, GenerateRequest, SamplingParams
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import Script
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import (
    ANSWER,
    ONCE,
    chat,
    collect,
    make,
    text_of,
)

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


async def test_a_prediction_goes_to_servers_that_take_one(server: ProviderServer, opened: list[OpenAIBackend]) -> None:
    knowing = make(server, "ok", capabilities=("generate", "logprobs", "prediction"), score_api="none")
    simple = make(server, "ok", capabilities=("generate",), score_api="none")
    opened += [knowing, simple]
    predicted = replace(chat(), prediction="Just so.")
    bodies = []
    asked = (knowing, predicted), (simple, predicted), (knowing, replace(chat(logprobs=0), prediction="Just so."))
    for backend, request in asked:
        await collect(backend, request)
        bodies.append(server.requests[-1].body)
    assert bodies[0]["prediction"] == {"type": "content", "content": "Just so."}
    assert not any("prediction" in body for body in bodies[1:])


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
        assert ending.stop_string == (stop if stop in ANSWER else None)
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


async def test_a_cookie_of_one_request_reaches_no_other(
    server: ProviderServer, transport: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, "sets_cookie", transport=transport)
    opened.append(backend)
    for _ in range(3):
        await collect(backend, chat())
        assert "cookie" not in server.requests[-1].headers


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
