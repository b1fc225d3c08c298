"""Tool calls and structured output over real HTTP: through the gateway to a server and back, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from backends.protocol import GenerateRequest, ToolCall
from backends.testing import EchoBackend, Script
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import EVERYTHING, make
from tests.gateway.harness import assert_error, echo_backends, make_settings, running

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "Weather of one city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (ToolCall("call_1", "forecast", '{"city": "Kiel"}'), ToolCall("call_2", "now", "{}"))
LOOP: list[Any] = [
    {"role": "user", "content": "Kiel?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "forecast", "arguments": '{"city": "Kiel"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CAPABLE = (*EVERYTHING, "tools", "structured_output", "images")


@pytest.mark.parametrize("is_remote", [True, False], ids=["remote", "in this process"])
async def test_calls_come_as_the_sdk_expects_them(tmp_path: Path, is_remote: bool) -> None:
    with ProviderServer(Script(text="", tool_calls=CALLS)) as server:
        large: Any = make(server, "ok", capabilities=CAPABLE) if is_remote else EchoBackend("large", server.script)
        async with (
            running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            whole = await client.chat.completions.create(model="expert", messages=LOOP[:1], tools=TOOLS)
            choice = whole.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            found = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]  # type: ignore[union-attr]
            assert found == [(call.call_id, call.name, call.arguments) for call in CALLS]
            async with client.chat.completions.stream(model="expert", messages=LOOP[:1], tools=TOOLS) as stream:
                async for _ in stream:
                    pass
                final = (await stream.get_final_completion()).choices[0]
            assert final.finish_reason == "tool_calls"
            assert [
                (c.id, c.function.name, json.loads(c.function.arguments)) for c in final.message.tool_calls or ()
            ] == [(call.call_id, call.name, json.loads(call.arguments)) for call in CALLS]
            answer = await client.chat.completions.create(model="expert", messages=LOOP, tools=TOOLS)
            assert answer.choices[0].finish_reason == "tool_calls"
        if is_remote:
            assert server.requests[-1].body["messages"] == LOOP
            assert server.requests[-1].body["tools"] == TOOLS


async def test_a_stream_names_each_call_once(tmp_path: Path) -> None:
    with ProviderServer(Script(text="", tool_calls=CALLS)) as server:
        large = make(server, "ok", capabilities=CAPABLE)
        async with running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway:
            text = (await gateway.chat("hi", model="expert", tools=TOOLS, stream=True)).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [p for c in chunks for choice in c["choices"] for p in choice["delta"].get("tool_calls", ())]
    assert [p["index"] for p in pieces if "id" in p] == [0, 1]
    assert all(p["type"] == "function" and p["function"]["name"] for p in pieces if "id" in p)
    assert all("name" not in p["function"] for p in pieces if "id" not in p)
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "tool_calls"


async def test_pieces_of_a_call_that_came_together_are_one(tmp_path: Path) -> None:
    """OpenAI's package joins a chunk's pieces to what it has by their place in the list, LlamaIndex reads the first."""
    with ProviderServer(Script(text="", tool_calls=CALLS)) as server:
        large = make(server, "one_write", capabilities=CAPABLE)
        async with running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway:
            text = (await gateway.chat("hi", model="expert", tools=TOOLS, stream=True)).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    lists = [found for c in chunks for choice in c["choices"] if (found := choice["delta"].get("tool_calls"))]
    pieces = [piece for (piece,) in lists]
    assert [(p["index"], p["id"], p["function"]["name"], p["function"]["arguments"]) for p in pieces] == [
        (place, call.call_id, call.name, call.arguments) for place, call in enumerate(CALLS)
    ]


async def test_the_log_keeps_what_was_called(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="I look.", tool_calls=CALLS))
    settings = make_settings(tmp_path, **{"log.prompts": "full"})
    async with running(settings, backends) as gateway:
        assert (
            await gateway.client.post(
                "/v1/chat/completions", json={"model": "expert", "messages": LOOP, "tools": TOOLS}
            )
        ).status_code == 200
        row = await gateway.row()
        assert row.finish_reason == "tool_calls"
        assert row.prompt_text == 'user: Kiel?\nassistant: \nassistant calls forecast: {"city": "Kiel"}\ntool: rain'
        assert row.answer_text == 'I look.\ncalls forecast: {"city": "Kiel"}\ncalls now: {}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"messages": LOOP}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages",
        ),
    ],
    ids=["tools", "results", "schema", "image"],
)
async def test_a_model_that_lacks_it_is_passed_over_or_named(
    tmp_path: Path, body: Mapping[str, Any], param: str
) -> None:
    plain = frozenset({"generate", "logprobs", "tokenize"})
    backends = echo_backends() | {"small": EchoBackend("small", capabilities=plain)}  # type: ignore[arg-type]
    async with running(make_settings(tmp_path), backends) as gateway:
        error = assert_error(await gateway.chat("hi", model="simple", **body), 400, "unsupported_parameter", param)
        assert "the model asked for" in error["message"]
        answer = await gateway.chat("hi", **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["suffice"]["tier_name"] == "expert"


async def test_a_missing_result_is_named(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        for messages, param in ((LOOP[:2], "messages"), ([*LOOP[:2], {"role": "user", "content": "?"}], "messages[2]")):
            answer = await gateway.chat(messages=messages, tools=TOOLS)
            assert "'call_1'" in assert_error(answer, 400, "invalid_value", param)["message"]


async def test_what_no_model_can_do_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    plain: Any = frozenset({"generate", "logprobs", "tokenize"})
    small, large = (CountingBackend(name, capabilities=plain) for name in ("small", "large"))
    async with running(make_settings(tmp_path), {"small": small, "large": large}) as gateway:
        answer = await gateway.chat("word " * 20_000, tools=TOOLS)
        assert_error(answer, 400, "unsupported_parameter", "tools")
    assert small.num_counted + large.num_counted == 0


async def test_a_prompt_with_tools_is_counted_by_a_model_that_takes_them(tmp_path: Path) -> None:
    """The top tier's template might refuse what it cannot write."""
    small = CountingBackend("small")
    large = CountingBackend("large", capabilities=frozenset({"generate", "tokenize"}))
    async with running(make_settings(tmp_path), {"small": small, "large": large}) as gateway:
        answer = await gateway.chat("word " * 4_000, tools=TOOLS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["suffice"]["tier_name"] == "simple"
    assert (small.num_counted > 0, large.num_counted) == (True, 0)


class CountingBackend(EchoBackend):
    """Counts how often it is asked for a prompt's length."""

    num_counted = 0

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        self.num_counted += 1
        return await super().count_tokens(request, limit=limit)
