"""The prompts a router is fitted on: a JSON Lines file of the user's own, or drawn tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.protocol import Message
from classifier.types import RouterRequest
from gateway.outcomes.answer_grading import CHECKERS
from gateway.outcomes.errors import PromptFileError

_FIELDS = ("prompt", "messages", "reference", "checker", "id")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt with what is known about its answer.

    Attributes
    ----------
    key : digest of messages and reference: the same prompt has the same key in every run
    messages : the conversation to answer
    reference : the right answer, None where nobody knows it
    checker : name in :data:`gateway.outcomes.answer_grading.CHECKERS`
    is_judged : False for rows a router is fitted on but that count for no metric and no threshold
    """

    key: str
    messages: tuple[Message, ...]
    reference: str | None = None
    checker: str = "final_answer"
    is_judged: bool = True

    @property
    def request(self) -> RouterRequest:
        """Return the prompt as the router sees it when it is served."""
        return RouterRequest(turns=tuple((message.role, message.content) for message in self.messages))

    @property
    def prompt(self) -> str:
        """Return the last user turn."""
        return self.request.text


def make_row(messages: tuple[Message, ...], reference: str | None = None, checker: str = "final_answer") -> PromptRow:
    """Return a row under its content's key."""
    content = json.dumps([[(m.role, m.content) for m in messages], reference, checker], sort_keys=True)
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return PromptRow(digest, messages, reference, checker)


def read_prompts(path: Path) -> list[PromptRow]:
    """Return rows of a file with one JSON object a line; repeated rows are kept once.

    A line holds ``prompt`` (text) or ``messages`` (role and content), and may hold ``reference`` (the right answer),
    ``checker`` (how to compare with it) and ``id`` (ignored).

    Raises
    ------
    PromptFileError
        The file cannot be read or holds nothing, or a line is not of this form; names the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            rows = [_read_line(path, number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(path, None, f"cannot be read as UTF-8 text ({error}).") from error
    if not rows:
        raise PromptFileError(path, None, "holds no prompts; expected one JSON object a line.")
    return unique_rows(rows)


def unique_rows(rows: Iterable[PromptRow]) -> list[PromptRow]:
    """Return rows in order, repeats dropped."""
    return list({row.key: row for row in rows}.values())


def _read_line(path: Path, number: int, line: str) -> PromptRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(path, number, f"is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise PromptFileError(path, number, 'is not an object; expected {"prompt": "..."} or {"messages": [...]}.')
    if unknown := sorted(set(value) - set(_FIELDS)):
        raise PromptFileError(path, number, f"has unknown fields {unknown}; expected some of {list(_FIELDS)}.")
    if ("prompt" in value) == ("messages" in value):
        raise PromptFileError(path, number, 'needs exactly one of "prompt" and "messages".')
    reference = value.get("reference")
    if reference is not None and not isinstance(reference, str | int | float):
        raise PromptFileError(path, number, f'has a "reference" of type {type(reference).__name__}; expected text.')
    checker = value.get("checker", "final_answer")
    if checker not in CHECKERS:
        raise PromptFileError(path, number, f"has an unknown checker {checker!r}; expected one of {sorted(CHECKERS)}.")
    messages = _messages(path, number, value)
    return make_row(messages, None if reference is None else str(reference), checker)


def _messages(path: Path, number: int, value: dict[str, Any]) -> tuple[Message, ...]:
    given = value.get("messages", [{"role": "user", "content": value.get("prompt")}])
    if not isinstance(given, list) or not given:
        raise PromptFileError(path, number, '"messages" must be a list of at least one message.')
    messages = []
    for each in given:
        role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
            raise PromptFileError(path, number, "every message needs a role and text that is not empty.")
        messages.append(Message(role, content))
    return tuple(messages)
