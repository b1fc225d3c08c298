"""Instructor: forms, its one purpose, in the ways it has of asking for them."""

from __future__ import annotations

from typing import Any

import instructor
import notes
import openai

plain = openai.OpenAI(base_url=f"{notes.URL}/v1", api_key="unused", max_retries=0)
question: Any = [{"role": "user", "content": notes.QUESTION}]
asked: Any = {"messages": question, "response_model": notes.Place, "model": notes.MODEL, "max_retries": 0}

for what, mode in (("form as tool", instructor.Mode.TOOLS), ("form", instructor.Mode.JSON_SCHEMA)):
    notes.filled(notes.CHAT, what, instructor.from_openai(plain, mode=mode).create(**asked))
items = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
notes.filled(
    notes.RESPONSES,
    "form as tool",
    items.responses.create(model=notes.MODEL, input=notes.QUESTION, response_model=notes.Place, max_retries=0),
)
*_, last = instructor.from_openai(plain, mode=instructor.Mode.TOOLS).create_partial(**asked)
notes.filled(notes.CHAT, "streamed form", last)
notes.report("instructor")
