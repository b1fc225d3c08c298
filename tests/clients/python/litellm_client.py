"""LiteLLM's SDK as a client of three protocols."""

from __future__ import annotations

import os
from typing import Any

# Its prices: by default they are fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import notes

tools: Any = [{"type": "function", "function": each} for each in notes.FUNCTIONS]
question: Any = [{"role": "user", "content": notes.QUESTION}]
models = {
    notes.CHAT: {"model": f"openai/{notes.MODEL}", "api_base": f"{notes.URL}/v1"},
    notes.MESSAGES: {"model": f"anthropic/{notes.MODEL}", "api_base": notes.URL},
}


def work(model: Any, is_streamed: bool) -> str | None:
    messages: Any = [{"role": "user", "content": notes.TASK}]
    while True:
        answer: Any = litellm.completion(
            **model, api_key="unused", messages=messages, tools=tools, stream=is_streamed, num_retries=0
        )
        if is_streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = notes.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


for endpoint, model in models.items():
    notes.worked(endpoint, "tools", work(model, is_streamed=False))
    notes.worked(endpoint, "streamed tools", work(model, is_streamed=True))
form: Any = litellm.completion(
    **models[notes.CHAT], api_key="unused", messages=question, response_format=notes.Place, num_retries=0
)
notes.filled(notes.CHAT, "form", notes.Place.model_validate_json(form.choices[0].message.content))
answer: Any = litellm.responses(**models[notes.CHAT], api_key="unused", input=notes.QUESTION)
notes.said(notes.RESPONSES, "answer", answer.output_text)
notes.report("litellm")
