"""``/v1/messages`` over real HTTP, as the official Python package asks and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from backends.protocol import ToolCall
from backends.testing import Script
from tests.backends.provider.behaviours import SIGNED
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import EVERYTHING, make
from tests.gateway.harness import Gateway, echo_backends, make_settings, running

TOOLS: list[Any] = [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]
HI: list[Any] = [{"role": "user", "content": "one two"}]


def client_of(gateway: Gateway) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0)


async def test_an_answer_is_whole_and_has_its_row(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway, client_of(gateway) as client:
        answer = await client.messages.create(model="auto", max_tokens=99, messages=HI, system="Echo.")
        assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "one two"}]
        assert answer.stop_reason == "end_turn"
        row = await gateway.row()
        assert (row.endpoint, f"msg_{row.request_id}") == ("/v1/messages", answer.id)
        assert row.prompt_tokens == answer.usage.input_tokens
        explained = await gateway.client.get(f"/v1/requests/{answer.id}")
        assert explained.status_code == 200
        cut = await client.messages.create(model="expert", max_tokens=1, messages=HI)
        assert cut.stop_reason == "max_tokens"
        gateway.assert_idle()


async def test_a_stream_joins_to_the_answer(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="one two", reasoning="hm", tool_calls=(ToolCall("c", "now", "{}"),)))
    async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        async with client.messages.stream(
            model="expert", max_tokens=2000, messages=HI, tools=TOOLS, thinking=thinking
        ) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.stop_reason == "tool_use"
        assert final.usage.output_tokens > 0
        plain = await client.messages.create(model="expert", max_tokens=2000, messages=HI, tools=TOOLS)
        assert [block.type for block in plain.content] == ["text", "tool_use"]


async def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="one two three"))
    async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
        asked: dict[str, Any] = {"model": "expert", "max_tokens": 99, "messages": HI}
        for stops, reason, found in (([" 3", " three"], "stop_sequence", " three"), ([" 3"], "end_turn", None)):
            whole = await client.messages.create(**asked, stop_sequences=stops)
            assert (whole.stop_reason, whole.stop_sequence) == (reason, found)
            async with client.messages.stream(**asked, stop_sequences=stops) as stream:
                final = await stream.get_final_message()
            assert (final.stop_reason, final.stop_sequence) == (reason, found)


async def test_signed_thinking_makes_the_round(tmp_path: Path) -> None:
    call = ToolCall("toolu_1", "now", "{}")
    with ProviderServer(Script(text="", reasoning="I need the time.", tool_calls=(call,))) as server:
        capabilities = (*EVERYTHING, "tools", "thinking_blocks")
        large: Any = make(server, "signs", capabilities=capabilities, thinking_parameter="none")
        async with (
            running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway,
            client_of(gateway) as client,
        ):
            thinking: Any = {"type": "enabled", "budget_tokens": 1024}
            asked: dict[str, Any] = {"model": "expert", "max_tokens": 2000, "tools": TOOLS, "thinking": thinking}
            async with client.messages.stream(**asked, messages=HI) as stream:
                streamed = await stream.get_final_message()
            whole = await client.messages.create(**asked, messages=HI)
            assert [each.to_dict() for each in whole.content] == [each.to_dict() for each in streamed.content]
            assert [each.to_dict() for each in whole.content[:2]] == [
                {"type": "thinking", "thinking": "I need the time.", "signature": SIGNED[0]["signature"]},
                SIGNED[1],
            ]
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:00"}
            history: list[Any] = [
                *HI,
                {"role": "assistant", "content": [each.to_dict() for each in whole.content]},
                {"role": "user", "content": [result]},
            ]
            await client.messages.create(**asked, messages=history)
            told = server.requests[-1].body["messages"][1]
            assert told["thinking_blocks"] == [SIGNED[0] | {"thinking": "I need the time."}, SIGNED[1]]
            assert [each["id"] for each in told["tool_calls"]] == ["toolu_1"]


async def test_a_tool_loop_runs_on_blocks(tmp_path: Path) -> None:
    scripts = [Script(text="I look.", tool_calls=(ToolCall("toolu_1", "now", "{}"),)), Script(text="noon")]
    async with running(make_settings(tmp_path), echo_backends(large=scripts)) as gateway, client_of(gateway) as client:
        first = await client.messages.create(model="expert", max_tokens=99, messages=HI, tools=TOOLS)
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:00"}
        history: list[Any] = [
            *HI,
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ]
        second = await client.messages.create(model="expert", max_tokens=99, messages=history, tools=TOOLS)
        assert [block.to_dict()["text"] for block in second.content] == ["noon"]
        messages = gateway.backends["large"].requests[-1].messages
        assert [message.role for message in messages] == ["user", "assistant", "tool", "user"]
        assert messages[1].tool_calls == (ToolCall("toolu_1", "now", "{}"),)


async def test_the_packages_own_loop_goes_on_without_a_thread(tmp_path: Path) -> None:
    """It asks the server to keep the conversation, and sends it itself where the server says that it does not."""

    @anthropic.beta_async_tool
    async def now() -> str:
        """Tell the time."""
        return "12:00"

    scripts = [Script(text="", tool_calls=(ToolCall("toolu_1", "now", "{}"),)), Script(text="noon")]
    async with running(make_settings(tmp_path), echo_backends(large=scripts)) as gateway, client_of(gateway) as client:
        runner = client.beta.messages.tool_runner(model="expert", max_tokens=99, tools=[now], messages=HI)
        last = await runner.until_done()
        assert [block.to_dict()["text"] for block in last.content] == ["noon"]
        sent = [[message.role for message in each.messages] for each in gateway.backends["large"].requests]
        assert sent == [["user"], ["user", "assistant", "tool"]]
        body = {"model": "auto", "max_tokens": 9, "messages": HI, "thread": {"type": "create"}}
        refused = await gateway.client.post("/v1/messages", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "thread"
        schemas = (await gateway.client.get("/openapi.json")).json()["components"]["schemas"]
        jsonschema.validate(refused.json(), schemas["AnthropicError"])


async def test_errors_are_those_of_the_package(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a b c d", fail_after=2))
    async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="nobody", max_tokens=9, messages=HI)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.create(model="auto", max_tokens=9, messages=[])
        with pytest.raises(anthropic.APIError):
            async with client.messages.stream(model="expert", max_tokens=9, messages=HI) as stream:
                await stream.get_final_message()
        assert (await gateway.row()).error_code == "answer_failed"
