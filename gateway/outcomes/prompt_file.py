"""The prompts a router is fitted on: a JSON Lines file of the user's own, or drawn tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.protocol import FREE_CHOICE, Message, Tool, ToolCall, ToolChoice
from classifier.types import RouterRequest
from gateway.api.chat_codec import ChatDecoder
from gateway.api.generation_body import BodyLimits
from gateway.api.request import Turn, messages_of
from gateway.api.tool_use import read_tool_features
from gateway.config.sections import ServerConfig
from gateway.errors import InvalidRequest
from gateway.outcomes.answer_grading import CHECKERS
from gateway.outcomes.errors import PromptFileError

_TOOL_FIELDS = ("tools", "tool_choice", "reference_calls")
_FIELDS = ("prompt", "messages", "reference", "checker", "id", *_TOOL_FIELDS)


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
    tools, tool_choice : what may be called, and whether it must
    tool_features : what the router reads of them, see :class:`classifier.types.RouterRequest`
    reference_calls : the right calls, empty where none is; None where nobody knows them
    """

    key: str
    messages: tuple[Message, ...]
    reference: str | None = None
    checker: str = "final_answer"
    is_judged: bool = True
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = FREE_CHOICE
    tool_features: tuple[float, ...] = ()
    reference_calls: tuple[ToolCall, ...] | None = None

    @property
    def needs_tools(self) -> bool:
        """Return whether a tier must be able to call tools to answer it."""
        return bool(self.tools) or any(each.tool_calls or each.tool_call_id for each in self.messages)

    @property
    def has_reference(self) -> bool:
        return self.reference is not None or self.reference_calls is not None

    @property
    def request(self) -> RouterRequest:
        """Return the prompt as the router sees it when it is served."""
        turns = tuple((message.role, message.content) for message in self.messages)
        return RouterRequest(turns=turns, tools=self.tool_features)

    @property
    def prompt(self) -> str:
        """Return the last user turn."""
        return self.request.text


def make_row(messages: tuple[Message, ...], reference: str | None = None, checker: str = "final_answer") -> PromptRow:
    """Return a row under its content's key."""
    content = json.dumps([[(m.role, m.content) for m in messages], reference, checker], sort_keys=True)
    return PromptRow(_digest(content), messages, reference, checker)


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def read_prompts(path: Path) -> list[PromptRow]:
    """Return rows of a file with one JSON object a line; repeated rows are kept once.

    A line holds ``prompt`` (text) or ``messages`` (role and content), and may hold ``reference`` (the right answer),
    ``checker`` (how to compare with it) and ``id`` (ignored). Messages may be those of a chat completion, with calls of
    tools, their results and content parts; then ``tools``, ``tool_choice`` and ``reference_calls`` may stand beside.

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
    reference = None if reference is None else str(reference)
    if _has_tools(value):
        return _read_tool_line(path, number, value, reference, checker)
    return make_row(_messages(path, number, value), reference, checker)


def _has_tools(value: dict[str, Any]) -> bool:
    messages = value.get("messages")
    return bool(value.keys() & set(_TOOL_FIELDS)) or (
        isinstance(messages, list)
        and any(isinstance(each, dict) and each.keys() & {"tool_calls", "tool_call_id"} for each in messages)
    )


def _read_tool_line(path: Path, number: int, value: dict[str, Any], reference: str | None, checker: str) -> PromptRow:
    """Read a conversation with tools as the server reads it: the same refusals, the same features."""
    body: dict[str, Any] = {name: value[name] for name in ("messages", "tools", "tool_choice") if name in value}
    if "prompt" in value:
        body["messages"] = [{"role": "user", "content": value["prompt"]}]
    try:
        asked = _DECODER({"model": "auto", **body}, {})
    except InvalidRequest as error:
        raise PromptFileError(path, number, f"is no chat with tools: {error}") from error
    (turns,) = asked.prompts
    calls = _reference_calls(path, number, value.get("reference_calls"))
    content = json.dumps([body, value.get("reference_calls"), reference, checker], sort_keys=True)
    return PromptRow(
        _digest(content),
        messages_of(tuple([each for each in turns if isinstance(each, Turn)])),
        reference,
        checker,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        tool_features=read_tool_features(asked, asked.turns) if asked.tools else (),
        reference_calls=calls,
    )


def _reference_calls(path: Path, number: int, given: Any) -> tuple[ToolCall, ...] | None:
    """Return the calls that are right, ``[{"name": …, "arguments": {…}}]``."""
    if given is None:
        return None
    calls = []
    for each in given if isinstance(given, list) else [None]:
        name, arguments = (each.get("name"), each.get("arguments")) if isinstance(each, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise PromptFileError(path, number, '"reference_calls" must be a list of {"name": "...", "arguments": {}}.')
        calls.append(ToolCall("", name, json.dumps(arguments)))
    return tuple(calls)


_DECODER = ChatDecoder(BodyLimits(ServerConfig(), {"any": 1}))


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
