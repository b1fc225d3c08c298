"""The format of Llama 3: the answer is ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``.

Without the tag nothing marks a call but the answer's beginning, so there only the name of a known tool makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from backends.local_engine.tool_formats.call_parser import CallParser
from backends.local_engine.tool_formats.grammar_writer import GrammarWriter
from backends.local_engine.tool_formats.json_call import JsonCall
from backends.local_engine.tool_formats.tool_format import arguments_of, to_json
from backends.protocol import Tool, ToolCall

TAG = "<|python_tag|>"
_BETWEEN = ";"


class Llama3Parser(CallParser):
    """Parses one answer. ``names`` are those of the tools there are."""

    begins_with = TAG

    def __init__(self, tokens: Collection[str], names: Collection[str]) -> None:
        super().__init__(tokens)
        self._names = names
        self._state = self._lead
        self._raw = ""

    @property
    def in_call(self) -> bool:
        return self._state == self._object

    def _start(self, marker: str) -> None:
        self._raw = marker
        self._state = self._lead

    def _lead(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == "{":
            self._call = JsonCall(self._begin, self._arguments)
            self._state = self._object
        else:
            self._give_up()
        return at

    def _object(self, text: str, at: int) -> int:
        end = self._call.feed(text, at)
        if self._call.status == "done":
            self._state, self._raw = self._after, ""
        elif self._call.status == "broken":
            self._break_off(text[at:end], in_arguments=self._call.is_in_arguments)
        return end

    def _after(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == _BETWEEN:
            self._state = self._lead
            return at + 1
        self._give_up()
        return at

    def _begin(self, name: str) -> bool:
        return name in self._names and super()._begin(name)


class Llama3Format:
    """``{"name": "f", "parameters": {}}``, several with semicolons between."""

    name = "llama3_json"
    markers: tuple[str, ...] = (TAG,)

    def fits(self, template: str, has_token: Callable[[str], bool]) -> bool:
        return TAG in template or '"parameters": ' in template

    def parser(self, tools: Sequence[Tool], tokens: Collection[str]) -> CallParser:
        return Llama3Parser(tokens, {tool.name for tool in tools})

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join([to_json({"name": call.name, "parameters": arguments_of(call)}) for call in calls])

    def call_id(self, call_id: str) -> str:
        return call_id

    def grammar(self, tools: Sequence[Tool], writer: GrammarWriter, *, parallel: bool) -> str:
        call = writer.new(" | ".join([writer.json_call(tool, "parameters") for tool in tools]))
        more = f' ("; " {call})*' if parallel else ""
        return writer.answer(TAG, call + more, bare=r'\s*\{\s*"name"')
