"""The ``anthropic`` package: messages whole, streamed, parsed, and its own loop over tools."""

from __future__ import annotations

from typing import Any

import anthropic
import notes

client = anthropic.Anthropic(base_url=notes.URL, api_key="unused", max_retries=0)
tools: Any = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
    for each in notes.FUNCTIONS
]


def work(is_streamed: bool) -> str:
    messages: Any = [{"role": "user", "content": notes.TASK}]
    while True:
        asked: Any = {"model": notes.MODEL, "max_tokens": 1000, "messages": messages, "tools": tools}
        if is_streamed:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": notes.call(block.name, dict(block.input))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


question: Any = [{"role": "user", "content": notes.QUESTION}]
notes.worked(notes.MESSAGES, "tools", work(is_streamed=False))
notes.worked(notes.MESSAGES, "streamed tools", work(is_streamed=True))

runner = client.beta.messages.tool_runner(
    model=notes.MODEL,
    max_tokens=1000,
    tools=[anthropic.beta_tool(notes.read_note), anthropic.beta_tool(notes.write_note)],
    messages=[{"role": "user", "content": notes.TASK}],
)
last = runner.until_done()
notes.worked(notes.MESSAGES, "tool runner", "".join(block.text for block in last.content if block.type == "text"))

with client.messages.stream(model=notes.MODEL, max_tokens=1000, messages=question) as words:
    notes.said(notes.MESSAGES, "stream", "".join(words.text_stream))
parsed = client.messages.parse(model=notes.MODEL, max_tokens=1000, messages=question, output_format=notes.Place)
notes.filled(notes.MESSAGES, "form", parsed.parsed_output)
notes.report("anthropic")
