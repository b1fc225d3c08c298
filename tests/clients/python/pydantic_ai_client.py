"""Pydantic-AI over three protocols: loops, streams, and forms in both ways it knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import notes
from anthropic import AsyncAnthropic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def drain(_: Any, events: AsyncIterable[Any]) -> None:
    """Have the answers streamed: ``run_stream`` takes the first text for the last."""
    async for _ in events:
        pass


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{notes.URL}/v1", api_key="unused")
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=notes.URL, api_key="unused", max_retries=0))
    models: Any = {
        notes.CHAT: OpenAIChatModel(notes.MODEL, provider=provider),
        notes.RESPONSES: OpenAIResponsesModel(notes.MODEL, provider=provider),
        notes.MESSAGES: AnthropicModel(notes.MODEL, provider=anthropic),
    }
    for endpoint, model in models.items():
        worker: Any = Agent(model, tools=[notes.read_note, notes.write_note])
        notes.worked(endpoint, "tools", (await worker.run(notes.TASK)).output)
        notes.worked(endpoint, "streamed tools", (await worker.run(notes.TASK, event_stream_handler=drain)).output)
        clerk: Any = Agent(model, output_type=notes.Place)
        notes.filled(endpoint, "form as tool", (await clerk.run(notes.QUESTION)).output)
        if endpoint != notes.MESSAGES:
            strict: Any = Agent(model, output_type=NativeOutput(notes.Place))
            notes.filled(endpoint, "form", (await strict.run(notes.QUESTION)).output)
    notes.report("pydantic-ai-slim")


asyncio.run(main())
