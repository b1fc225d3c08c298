"""What bad input gets: a 400 that names the field, never a crash; and the next good request is served."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.errors import ContextLengthExceeded
from tests.gateway.harness import Gateway, assert_error, make_settings, running

MESSAGES = [{"role": "user", "content": "hi"}]

# (what is wrong with the body, the field that is blamed)
TOOL = {"type": "function", "function": {"name": "f"}}
WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"user": 7}, "user"),
    ({"metadata": "m"}, "metadata"),
    ({"store": "yes"}, "store"),
    ({"service_tier": 1}, "service_tier"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": MESSAGES * 3000}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": 3, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [*MESSAGES, {"role": "user", "content": "x", "name": 7}]}, "messages[1].name"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"model": "m" * 5000}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": "two"}, "n"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": ["x", 5]}, "stop[1]"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": "x" * 1000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"seed": "dice"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "y"}}, "stream_options.include_usage"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 0 for i in range(2000)}}, "logit_bias"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ({"suffice": []}, "suffice"),
    ({"suffice": {"teir": 1}}, "suffice.teir"),
    ({"suffice": {"tier": 3}}, "suffice.tier"),
    ({"suffice": {"tier": 0}}, "suffice.tier"),
    ({"suffice": {"tier": "gold"}}, "suffice.tier"),
    ({"suffice": {"tier": 1.5}}, "suffice.tier"),
    ({"suffice": {"explore": "maybe"}}, "suffice.explore"),
    ({"suffice": {"session_id": ""}}, "suffice.session_id"),
    ({"suffice": {"session_id": "s" * 1000}}, "suffice.session_id"),
    ({"suffice": {"policy": "none such"}}, "suffice.policy"),
    ({"suffice": {"priority": "urgent"}}, "suffice.priority"),
    ({"suffice": {"min_tier": 2, "max_tier": 1}}, "suffice.min_tier"),
    ({"suffice": {"policy": "careful", "max_tier": 1}}, "suffice.max_tier"),
    ({"model": "simple", "suffice": {"tier": 2}}, "suffice.tier"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [TOOL] * 513}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"format": "wav"}}]}]},
        "messages[0].content[0].input_audio.data",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "A", "format": "midi"}}]}
            ]
        },
        "messages[0].content[0].input_audio.format",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
        "messages[0].content[0].file.file_data",
    ),
]

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"guided_json": {}}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_video"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
        "messages[0].content[0].file.file_id",
    ),
]

# What other servers tolerate: unknown fields, and options that change nothing.
TOLERATED: list[dict[str, Any]] = [
    {"no_such_field": {"deep": [1, 2]}},
    {"user": "u-1", "metadata": {"team": "x"}, "store": False, "parallel_tool_calls": True},
    {"tools": [], "tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"stream_options": {"include_usage": True}},
    {"temperature": None, "top_p": None, "stop": None, "n": None, "seed": None, "stream": None, "tools": None},
    {"temperature": 0, "top_p": 0, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1},
    {"max_tokens": 1, "max_completion_tokens": 5},
    {"stop": "END"},
    {"logit_bias": {"5": -100, "6": 3.5}},
    {"service_tier": "auto"},
    {"reasoning_effort": "high"},
    {"chat_template_kwargs": {"enable_thinking": False, "other": 1}},
    {"suffice": {"tier": "expert", "explore": False, "session_id": "s1", "policy": "careful"}},
    {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi", "name": "ann"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running(make_settings(tmp_path_factory.mktemp("bad"))) as up:
        yield up


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def check_still_serves(gateway: Gateway) -> None:
    response = await gateway.chat("still there")
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "still there"
    gateway.assert_idle()


@pytest.mark.parametrize(("change", "param"), WRONG_FIELDS, ids=lambda value: str(value)[:40])
async def test_a_wrong_field_is_named(gateway: Gateway, change: dict[str, Any], param: str) -> None:
    response = await gateway.client.post("/v1/chat/completions", json={"model": "auto", "messages": MESSAGES} | change)
    assert response.status_code == 400, response.text
    error = assert_error(response, 400, response.json()["error"]["code"], param)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 600
    gateway.assert_idle()


@pytest.mark.parametrize(("change", "param"), UNSUPPORTED, ids=lambda value: str(value)[:40])
async def test_what_cannot_be_done_is_refused(gateway: Gateway, change: dict[str, Any], param: str) -> None:
    response = await gateway.client.post("/v1/chat/completions", json={"model": "auto", "messages": MESSAGES} | change)
    assert_error(response, 400, "unsupported_parameter", param)


@pytest.mark.parametrize("change", TOLERATED, ids=lambda value: str(value)[:40])
async def test_what_changes_nothing_is_tolerated(gateway: Gateway, change: dict[str, Any]) -> None:
    response = await gateway.client.post("/v1/chat/completions", json={"model": "auto", "messages": MESSAGES} | change)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nope",
        b'{"model": "auto", "temperature": NaN}',
        b'{"model": "auto", "temperature": Infinity}',
        b'{"model": "auto", "temperature": 1e999}',
        b'{"model": "auto", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "auto", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b'{"a":' * 40 + b"1" + b"}" * 40,
        b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model": "auto"} trailing',
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_what_is_not_json_is_said_so(gateway: Gateway, body: bytes) -> None:
    response = await gateway.client.post("/v1/chat/completions", content=body)
    assert_error(response, 400, "invalid_json")
    await check_still_serves(gateway)


@pytest.mark.parametrize("body", [b"[]", b"3", b'"x"', b"null", b"true"])
async def test_json_that_is_no_object_is_said_so(gateway: Gateway, body: bytes) -> None:
    error = assert_error(await gateway.client.post("/v1/chat/completions", content=body), 400, "invalid_value")
    assert "expected a JSON object" in error["message"]


async def test_an_unknown_model_is_a_404_that_lists_the_known(gateway: Gateway) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {"model": "gpt-9", "messages": MESSAGES, "prompt": "x"}
        error = assert_error(await gateway.client.post(path, json=body), 404, "model_not_found", "model")
        assert "simple" in error["message"]
    assert_error(await gateway.client.get("/v1/models/gpt-9"), 404, "model_not_found", "model")


# OpenAI's words; LiteLLM's context-window fallbacks go by the first seven.
_CONTEXT_WORDS = r"This model's maximum context length is (\d+) tokens\. However, your messages resulted in (\d+) "


@pytest.mark.parametrize("model", ["auto", "simple"])
async def test_a_prompt_beyond_every_context_is_told_with_the_numbers(gateway: Gateway, model: str) -> None:
    """(fault review S8)"""
    for content, limits in (("word " * 9000, {}), ("hi", {"max_tokens": 9000})):
        response = await gateway.chat(content, model=model, **limits)
        error = assert_error(response, 400, "context_length_exceeded", "messages")
        found = re.match(_CONTEXT_WORDS, error["message"])
        assert found is not None, error["message"]
        assert int(found[1]) == 8192
        assert (int(found[2]) >= 9000) == (limits == {})
    await check_still_serves(gateway)


async def test_the_tiers_own_refusal_has_the_same_words() -> None:
    """A remote tier's context is known only once it has refused (fault review S8)."""
    assert re.match(_CONTEXT_WORDS, str(ContextLengthExceeded(9000, 8192)))
    assert "resulted in at least 9000 tokens" in str(ContextLengthExceeded(9000, 8192, is_counted=False))


async def test_unknown_paths_and_methods_have_the_same_shape(gateway: Gateway) -> None:
    assert_error(await gateway.client.get("/v1/nothing"), 404, "unknown_url")
    assert_error(await gateway.client.get("/"), 404, "unknown_url")
    response = await gateway.client.get("/v1/chat/completions")
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_contradicting_duplicate_headers_are_refused(gateway: Gateway) -> None:
    body = {"model": "auto", "messages": MESSAGES}
    twice = [("x-suffice-tier", "1"), ("x-suffice-tier", "2")]
    assert_error(await gateway.client.post("/v1/chat/completions", json=body, headers=twice), 400, "invalid_value")
    same = [("x-suffice-tier", "1"), ("x-suffice-tier", "1")]
    response = await gateway.client.post("/v1/chat/completions", json=body, headers=same)
    assert response.headers["x-suffice-tier"] == "1"
    unknown = {"x-suffice-teir": "1"}
    assert_error(await gateway.client.post("/v1/chat/completions", json=body, headers=unknown), 400, "invalid_value")
    wrong = {"x-suffice-tier": "gold"}
    assert_error(
        await gateway.client.post("/v1/chat/completions", json=body, headers=wrong),
        400,
        "unknown_tier",
        "x-suffice-tier",
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
known_fields = st.sampled_from(
    [
        "model", "messages", "temperature", "top_p", "top_k", "n", "stop", "seed", "max_tokens", "stream",
        "stream_options", "logprobs", "top_logprobs", "logit_bias", "suffice", "tools", "response_format",
        "reasoning_effort", "chat_template_kwargs", "prompt", "echo", "best_of", "input", "encoding_format",
    ]
)  # fmt: skip
bodies = st.dictionaries(known_fields | st.text(max_size=8), json_values, max_size=8)


@given(bodies, st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]), st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_json_gets_an_answer_or_a_named_refusal(
    gateway: Gateway, body: dict[str, Any], path: str, complete: bool
) -> None:
    if complete:
        body = {"model": "auto", "messages": MESSAGES, "prompt": "x", "input": "x"} | body
    content = json.dumps(body).encode()
    response = await gateway.client.post(path, content=content)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert_error(
            response, response.status_code, response.json()["error"]["code"], response.json()["error"]["param"]
        )
    gateway.assert_idle()


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_bytes_get_a_named_refusal(gateway: Gateway, content: bytes) -> None:
    response: httpx.Response = await gateway.client.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    gateway.assert_idle()
