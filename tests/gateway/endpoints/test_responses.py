"""``/v1/responses`` over real HTTP, as the official Python package asks and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from backends.protocol import ToolCall
from backends.testing import Script
from tests.gateway.harness import Gateway, echo_backends, make_settings, running

TOOLS: list[Any] = [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]


class Place(BaseModel):
    city: str


def client_of(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def test_an_answer_is_whole_and_has_its_row(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway, client_of(gateway) as client:
        answer = await client.responses.create(model="auto", input="one two", instructions="Echo.")
        assert (answer.output_text, answer.status, answer.store) == ("one two", "completed", False)
        Response.model_validate(answer.model_dump(by_alias=True))
        row = await gateway.row()
        assert (row.endpoint, f"resp_{row.request_id}") == ("/v1/responses", answer.id)
        assert answer.usage is not None
        assert row.prompt_tokens == answer.usage.input_tokens
        explained = await gateway.client.get(f"/v1/requests/{answer.id}")
        assert explained.status_code == 200
        gateway.assert_idle()


async def test_a_stream_ends_in_the_same_answer(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="one two", reasoning="hm"))
    async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
        async with client.responses.stream(model="expert", input="hi") as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "one two"
        assert [item.type for item in final.output] == ["reasoning", "message"]
        # OpenAI's npm package takes no piece of a part that was not announced.
        assert 0 < seen.index("response.content_part.added") < seen.index("response.reasoning_text.delta")
        assert seen.count("response.content_part.added") == seen.count("response.content_part.done") == 2
        whole = await client.responses.create(model="expert", input="hi")
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        cut = await client.responses.create(model="expert", input="hi", max_output_tokens=2)
        assert cut.status == "incomplete"
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"


async def test_a_tool_loop_runs_on_items(tmp_path: Path) -> None:
    scripts = [Script(text="I look.", tool_calls=(ToolCall("call_1", "now", "{}"),)), Script(text="noon")]
    backends = echo_backends(large=scripts)
    async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
        history: list[Any] = [{"role": "user", "content": "time?"}]
        first = await client.responses.create(model="expert", input=history, tools=TOOLS)
        call = next(item for item in first.output if item.type == "function_call")
        assert (call.call_id, call.arguments) == ("call_1", "{}")
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "12:00"})
        second = await client.responses.create(model="expert", input=history, tools=TOOLS)
        assert second.output_text == "noon"
        messages = gateway.backends["large"].requests[-1].messages
        assert [message.role for message in messages] == ["user", "assistant", "tool"]
        assert messages[1].tool_calls == (ToolCall("call_1", "now", "{}"),)


async def test_the_package_parses_structured_output(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text='{"city": "Kiel"}'))
    async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
        parsed = await client.responses.parse(model="expert", input="where?", text_format=Place)
        assert parsed.output_parsed == Place(city="Kiel")
        wanted = gateway.backends["large"].requests[-1].output_format
        assert (wanted.kind, wanted.strict) == ("json_schema", True)


async def test_a_broken_stream_raises_in_the_package(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a b c d", fail_after=2))
    async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
        stream = await client.responses.create(model="expert", input="hi", stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
        assert (await gateway.row()).error_code == "answer_failed"
