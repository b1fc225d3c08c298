"""The OpenAI Agents SDK over both of its protocols."""

from __future__ import annotations

import asyncio
from typing import Any

import notes
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
tools: Any = [function_tool(notes.read_note), function_tool(notes.write_note)]


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{notes.URL}/v1", api_key="unused", max_retries=0)
    models: Any = {
        notes.CHAT: OpenAIChatCompletionsModel(notes.MODEL, client),
        notes.RESPONSES: OpenAIResponsesModel(notes.MODEL, client),
    }
    for endpoint, model in models.items():
        worker: Any = Agent("worker", instructions="Do what you are told.", model=model, tools=tools)
        whole = await Runner.run(worker, notes.TASK)
        notes.worked(endpoint, "tools", whole.final_output)
        stream = Runner.run_streamed(worker, notes.TASK)
        async for _ in stream.stream_events():
            pass
        notes.worked(endpoint, "streamed tools", stream.final_output)
        clerk: Any = Agent("clerk", model=model, output_type=notes.Place)
        notes.filled(endpoint, "form", (await Runner.run(clerk, notes.QUESTION)).final_output)
    notes.report("openai-agents")


asyncio.run(main())
