"""The ``openai`` package: chat and responses, whole, through the streaming helpers, and parsed."""

from __future__ import annotations

from typing import Any

import notes
import openai

client = openai.OpenAI(base_url=f"{notes.URL}/v1", api_key="unused", max_retries=0)
chat_tools: Any = [{"type": "function", "function": {**each, "strict": True}} for each in notes.FUNCTIONS]
item_tools: Any = [{"type": "function", **each} for each in notes.FUNCTIONS]


def chat(is_streamed: bool) -> str | None:
    messages: Any = [{"role": "user", "content": notes.TASK}]
    while True:
        asked: Any = {"model": notes.MODEL, "messages": messages, "tools": chat_tools}
        if is_streamed:
            with client.chat.completions.stream(**asked) as stream:
                for _ in stream:
                    pass
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = notes.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(is_streamed: bool) -> str:
    items: Any = [{"role": "user", "content": notes.TASK}]
    while True:
        asked: Any = {"model": notes.MODEL, "input": items, "tools": item_tools}
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**asked)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            result = notes.call(call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


question: Any = [{"role": "user", "content": notes.QUESTION}]
for streamed in (False, True):
    what = "streamed tools" if streamed else "tools"
    notes.worked(notes.CHAT, what, chat(streamed))
    notes.worked(notes.RESPONSES, what, responses(streamed))

chunks = client.chat.completions.create(model=notes.MODEL, messages=question, stream=True)
notes.said(notes.CHAT, "stream", "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
events = client.responses.create(model=notes.MODEL, input=notes.QUESTION, stream=True)
notes.said(
    notes.RESPONSES, "stream", "".join(event.delta for event in events if event.type == "response.output_text.delta")
)

parsed = client.chat.completions.parse(model=notes.MODEL, messages=question, response_format=notes.Place)
notes.filled(notes.CHAT, "form", parsed.choices[0].message.parsed)
notes.filled(
    notes.RESPONSES,
    "form",
    client.responses.parse(model=notes.MODEL, input=notes.QUESTION, text_format=notes.Place).output_parsed,
)
notes.report("openai")
