"""Says what is wrong with an answer for certain, asking no model: the check that costs nothing.

Looked at are the calls of tools (does each parse, name a tool that it may, satisfy that tool's schema, and was one made
where one is required) and the text where the request says what it must be. An answer without a fault may still be
wrong; one with a fault is useless to its caller, whatever any grader would say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from backends.protocol import GenerateRequest, OutputFormat, Tool, ToolCall, ToolChoice
from gateway.api.request import InferenceRequest
from gateway.outcomes.schema_validator import MAX_WORK, parse_json, satisfies


class Fault(StrEnum):
    """Names what is wrong: of a call, of calls that are missing or not permitted, of the text."""

    NOT_JSON = "not_json"
    UNKNOWN_TOOL = "unknown_tool"
    BREAKS_SCHEMA = "breaks_schema"
    MISSING_CALL = "missing_call"
    FORBIDDEN_CALL = "forbidden_call"
    BREAKS_FORMAT = "breaks_format"


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Holds what a request asks of the form of its answer.

    Parameters
    ----------
    tools, choice : what may be called, and whether it must
    format : what the text must be, where nothing is called
    max_work : see :data:`gateway.outcomes.schema_validator.MAX_WORK`; an answer's calls share it
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    format: OutputFormat
    max_work: int = MAX_WORK

    @classmethod
    def of(cls, request: InferenceRequest | GenerateRequest, num_answers: int = 1) -> AnswerRules | None:
        """Return a request's rules; None where any text will do. So many answers share the work."""
        if not request.tools and request.output_format.kind not in _CHECKED_FORMATS:
            return None
        return cls(request.tools, request.tool_choice, request.output_format, MAX_WORK // num_answers)

    def fault(self, text: str, calls: Sequence[ToolCall]) -> Fault | None:
        """Return what is wrong with a whole answer; None where nothing is known to be."""
        if calls:
            return self._fault_of_calls(calls)
        if self.choice.mode == "required":
            return Fault.MISSING_CALL
        return Fault.BREAKS_FORMAT if breaks_format(text, self.format, self.max_work) else None

    def _fault_of_calls(self, calls: Sequence[ToolCall]) -> Fault | None:
        if self.choice.mode == "none" or (len(calls) > 1 and not self.choice.parallel):
            return Fault.FORBIDDEN_CALL
        offered = {tool.name: tool for tool in self.tools}
        max_work = self.max_work // len(calls)
        for call in calls:
            tool = offered.get(call.name)
            if tool is None:
                return Fault.UNKNOWN_TOOL
            if self.choice.names and call.name not in self.choice.names:
                return Fault.FORBIDDEN_CALL
            if (fault := _fault_of_arguments(call.arguments, tool, max_work)) is not None:
                return fault
        return None


def _fault_of_arguments(arguments: str, tool: Tool, max_work: int) -> Fault | None:
    try:
        value = parse_json(arguments)
    except ValueError:
        return Fault.NOT_JSON
    if not isinstance(value, dict):
        return Fault.BREAKS_SCHEMA
    is_broken = bool(tool.parameters) and satisfies(tool.parameters, value, max_work) is False
    return Fault.BREAKS_SCHEMA if is_broken else None


_CHECKED_FORMATS = frozenset({"json_object", "json_schema", "choice"})


def breaks_format(text: str, wanted: OutputFormat, max_work: int = MAX_WORK) -> bool:
    """Return whether a text is known not to be what was asked for; of expressions and grammars nothing is known."""
    if wanted.kind == "choice":
        return text not in wanted.spec
    if wanted.kind not in _CHECKED_FORMATS:
        return False
    try:
        value: Any = parse_json(text)
    except ValueError:
        return True
    if wanted.kind == "json_object":
        return not isinstance(value, dict)
    return isinstance(wanted.spec, dict) and satisfies(wanted.spec, value, max_work) is False
