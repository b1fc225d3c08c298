"""Says what a tool format is: how calls are parsed, written into a prompt, and constrained."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from backends.local_engine.tool_formats.call_parser import CallParser
from backends.local_engine.tool_formats.grammar_writer import GrammarWriter
from backends.protocol import Tool, ToolCall


class ToolFormat(Protocol):
    """One way of writing calls; stateless.

    Attributes
    ----------
    name : what configuration calls it
    markers : texts that are tokens of their own in the vocabularies of most models that use it
    """

    name: str
    markers: tuple[str, ...]

    def fits(self, template: str, has_token: Callable[[str], bool]) -> bool:
        """Tell from a template's source and the vocabulary whether a model writes calls like this."""

    def parser(self, tools: Sequence[Tool], tokens: Collection[str]) -> CallParser:
        """Return a parser of one answer; ``tokens`` are the markers that are tokens of the vocabulary."""

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model would have written them, for templates that cannot."""

    def call_id(self, call_id: str) -> str:
        """Return an id as the format's templates take it; the same for the same."""

    def grammar(self, tools: Sequence[Tool], writer: GrammarWriter, *, parallel: bool) -> str:
        """Return the grammar of an answer; without ``parallel`` it has one call at most."""


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as an object; what is none is kept under ``arguments``."""
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": call.arguments}


def to_json(value: Mapping[str, Any]) -> str:
    """Return JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)
