"""LlamaIndex's ``OpenAILike``: a loop of its agent, a stream, a form."""

from __future__ import annotations

import asyncio

import notes
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=notes.MODEL,
    api_base=f"{notes.URL}/v1",
    api_key="unused",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)
tools = [FunctionTool.from_defaults(notes.read_note), FunctionTool.from_defaults(notes.write_note)]


async def main() -> None:
    for what, is_streamed in (("tools", False), ("streamed tools", True)):
        agent = FunctionAgent(tools=tools, llm=model, streaming=is_streamed)
        notes.worked(notes.CHAT, what, str(await agent.run(notes.TASK)))
    question = [ChatMessage(role="user", content=notes.QUESTION)]
    pieces = await model.astream_chat(question)
    notes.said(notes.CHAT, "stream", "".join([piece.delta or "" async for piece in pieces]))
    notes.filled(notes.CHAT, "form as tool", (await model.as_structured_llm(notes.Place).achat(question)).raw)
    notes.report("llama-index-llms-openai-like")


asyncio.run(main())
