"""The format of Hermes and Qwen: ``<tool_call>``, a JSON object, ``</tool_call>``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from backends.local_engine.tool_formats.call_parser import CallParser
from backends.local_engine.tool_formats.grammar_writer import GrammarWriter
from backends.local_engine.tool_formats.json_call import JsonCall
from backends.local_engine.tool_formats.tool_format import arguments_of, to_json
from backends.protocol import Tool, ToolCall

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Parses one answer."""

    begins_with, ends_with = BEGIN, END

    def _start(self, marker: str) -> None:
        self._raw = marker
        self._call = JsonCall(self._begin, self._arguments)
        self._state = self._object

    def _object(self, text: str, at: int) -> int:
        end = self._call.feed(text, at)
        if self._call.status == "done":
            self._state = self._closing
        elif self._call.status == "broken":
            self._break_off(text[at:end], in_arguments=self._call.is_in_arguments)
        return end


class HermesFormat:
    """``<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>``, one a line."""

    name = "hermes"
    markers: tuple[str, ...] = (BEGIN, END)

    def fits(self, template: str, has_token: Callable[[str], bool]) -> bool:
        return BEGIN in template

    def parser(self, tools: Sequence[Tool], tokens: Collection[str]) -> CallParser:
        return HermesParser(tokens)

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = [to_json({"name": call.name, "arguments": arguments_of(call)}) for call in calls]
        return "\n".join([f"{BEGIN}\n{each}\n{END}" for each in objects])

    def call_id(self, call_id: str) -> str:
        return call_id

    def grammar(self, tools: Sequence[Tool], writer: GrammarWriter, *, parallel: bool) -> str:
        objects = [writer.json_call(tool, "arguments") for tool in tools]
        call = writer.new(f'"\\n" ({" | ".join(objects)}) "\\n" {writer.marker(END)}')
        more = f" (/\\n{{0,2}}/ {writer.marker(BEGIN)} {call})*" if parallel else ""
        return writer.answer(BEGIN, call + more)
