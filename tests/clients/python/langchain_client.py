"""LangChain's ``ChatOpenAI`` over both of its protocols."""

from __future__ import annotations

from typing import Any

import notes
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

tools = [tool(notes.read_note), tool(notes.write_note)]


def work(model: Any, is_streamed: bool) -> str:
    bound, messages = model.bind_tools(tools), [HumanMessage(notes.TASK)]
    while True:
        if is_streamed:
            first, *rest = bound.stream(messages)
            answer = sum(rest, first)
        else:
            answer = bound.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return answer.text
        for call in answer.tool_calls:
            messages.append(ToolMessage(notes.call(call["name"], call["args"]), tool_call_id=call["id"]))


for endpoint in (notes.CHAT, notes.RESPONSES):
    uses_items = endpoint == notes.RESPONSES
    model = ChatOpenAI(
        model=notes.MODEL, base_url=f"{notes.URL}/v1", api_key="unused", max_retries=0, use_responses_api=uses_items
    )
    notes.worked(endpoint, "tools", work(model, is_streamed=False))
    notes.worked(endpoint, "streamed tools", work(model, is_streamed=True))
    notes.said(endpoint, "stream", "".join(chunk.text for chunk in model.stream(notes.QUESTION)))
    for what, method in (("form", "json_schema"), ("form as tool", "function_calling")):
        notes.filled(endpoint, what, model.with_structured_output(notes.Place, method=method).invoke(notes.QUESTION))
notes.report("langchain-openai")
