"""The format of Qwen3-Coder: ``<tool_call>``, a ``<function=…>`` with its ``<parameter=…>``, ``</tool_call>``.

Parameters are bare text. They become JSON by their schema's types: strings as they come, others once they are whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from backends.local_engine.tool_formats.call_parser import CallParser
from backends.local_engine.tool_formats.grammar_writer import GrammarWriter, literal, parameters_of, regex
from backends.local_engine.tool_formats.parameter_types import ParameterTypes, to_argument
from backends.local_engine.tool_formats.tool_format import arguments_of
from backends.protocol import Tool, ToolCall

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_TAG_CHARS = 400
_NAME = re.compile(r"[^<>\s]+")
_STRING = frozenset({"string"})


class Qwen3CoderParser(CallParser):
    """Parses one answer. ``types`` are by the tool's name."""

    begins_with, ends_with = BEGIN, END

    def __init__(self, tokens: Collection[str], types: Mapping[str, ParameterTypes]) -> None:
        super().__init__(tokens)
        self._types_of = types
        self._types = ParameterTypes({})
        self._tag = ""
        self._num_parameters = 0
        self._key_types = _STRING
        self._value = ""
        # Of a parameter: whether its first character is still to come, and a line break that may be its last.
        self._is_first = False
        self._break = ""

    def marker(self, marker: str) -> None:
        if marker == END and self._state == self._between:
            self._show_held()
            self._close()
            self._state = self._outside
        else:
            super().marker(marker)

    def _start(self, marker: str) -> None:
        self._raw, self._tag, self._state = marker, "", self._function

    def _function(self, text: str, at: int) -> int:
        tag, stray = self._read_tag(text[at], _FUNCTION)
        if stray:
            self._give_up(text[at])
        elif tag:
            name = tag[len(_FUNCTION) : -1]
            self._begin(name)
            self._types = self._types_of.get(name) or ParameterTypes({})
            self._num_parameters, self._state = 0, self._between
        return at + 1

    def _between(self, text: str, at: int) -> int:
        """Read what stands between parameters; what has no place there is text."""
        tag, stray = self._read_tag(text[at], _PARAMETER, _FUNCTION_END, END)
        if stray:
            self._show(stray)
        elif tag.startswith(_PARAMETER):
            self._open(tag[len(_PARAMETER) : -1])
        elif tag:
            self._close()
            self._state = self._closing if tag == _FUNCTION_END else self._outside
        return at + 1

    def _open(self, key: str) -> None:
        before = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._key_types = self._types.of(key)
        quote = '"' if self._key_types == _STRING else ""
        self._arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self._value, self._break, self._is_first, self._state = "", "", True, self._parameter

    def _close(self) -> None:
        self._arguments("}" if self._num_parameters else "{}")

    def _parameter(self, text: str, at: int) -> int:
        before, end, is_found = self._search(_PARAMETER_END, text, at)
        self._take_value(before)
        if is_found:
            # The last line break stands before the tag, and is not part of the value.
            self._break, self._state = "", self._between
            self._arguments('"' if self._key_types == _STRING else to_argument(self._value, self._key_types))
        return end

    def _take_value(self, text: str) -> None:
        if self._is_first and text:
            self._is_first, text = False, text.removeprefix("\n")
        text, self._break = self._break + text, ""
        if text.endswith("\n"):
            text, self._break = text[:-1], "\n"
        if self._key_types == _STRING:
            self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _show_held(self) -> None:
        if self._state == self._parameter:
            # A value that is cut off.
            held, self._held = self._held, ""
            self._take_value(held)
            if self._key_types != _STRING:
                self._arguments(self._value)
        elif self._state == self._between and self._tag:
            self._show(self._tag)
            self._tag = ""
        super()._show_held()

    def _read_tag(self, char: str, *tags: str) -> tuple[str, str]:
        """Take one more character; return a tag that it completes, or else what turns out to be none."""
        if not self._tag and char.isspace():
            return "", ""
        tag = self._tag = self._tag + char
        for each in tags:
            if each.startswith(tag) and tag != each:
                return "", ""
            if each.endswith(">"):
                if tag == each:
                    self._tag = ""
                    return tag, ""
            elif tag.startswith(each) and len(tag) <= _TAG_CHARS:
                if char != ">":
                    return "", ""
                if _NAME.fullmatch(tag[len(each) : -1]):
                    self._tag = ""
                    return tag, ""
        self._tag = ""
        return "", tag


class Qwen3CoderFormat:
    """``<tool_call>\\n<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>\\n</tool_call>``, one a line."""

    name = "qwen3_coder"
    markers: tuple[str, ...] = (BEGIN, END)

    def fits(self, template: str, has_token: Callable[[str], bool]) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def parser(self, tools: Sequence[Tool], tokens: Collection[str]) -> CallParser:
        return Qwen3CoderParser(tokens, {tool.name: ParameterTypes(tool.parameters) for tool in tools})

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join([self._write(call) for call in calls])

    def _write(self, call: ToolCall) -> str:
        parameters = [
            f"{_PARAMETER}{key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            f"\n{_PARAMETER_END}\n"
            for key, value in arguments_of(call).items()
        ]
        return f"{BEGIN}\n{_FUNCTION}{call.name}>\n{''.join(parameters)}{_FUNCTION_END}\n{END}"

    def call_id(self, call_id: str) -> str:
        return call_id

    def grammar(self, tools: Sequence[Tool], writer: GrammarWriter, *, parallel: bool) -> str:
        value_end = writer.new(f"/(.|\\n)*\\n{regex(_PARAMETER_END)}\\n/", lazy=True)
        functions = [self._function(tool, writer, value_end) for tool in tools]
        call = writer.new(f'"\\n" ({" | ".join(functions)}) "\\n" {writer.marker(END)}')
        more = f" (/\\n{{0,2}}/ {writer.marker(BEGIN)} {call})*" if parallel else ""
        return writer.answer(BEGIN, call + more)

    def _function(self, tool: Tool, writer: GrammarWriter, value_end: str) -> str:
        schema = parameters_of(tool)
        properties = schema.get("properties")
        required = schema.get("required") or ()
        types = ParameterTypes(schema)
        parameters = []
        for key in properties if isinstance(properties, Mapping) else ():
            if not _NAME.fullmatch(key):
                continue
            checked = types.schema(key) if writer.is_checked(tool) else None
            value = self._value(checked, types.of(key), tool, writer, value_end)
            parameters.append(
                f"({literal(f'{_PARAMETER}{key}>' + chr(10))} {value})" + ("" if key in required else "?")
            )
        head, end = literal(f"{_FUNCTION}{tool.name}>\n"), literal(_FUNCTION_END)
        return writer.new(" ".join([head, *parameters, end]))

    def _value(self, schema: Any, types: frozenset[str], tool: Tool, writer: GrammarWriter, value_end: str) -> str:
        """Return what a parameter is, with the tag after it; a string ends with that, whatever it holds."""
        after = literal(f"\n{_PARAMETER_END}\n")
        if schema is not None and "string" not in types:
            return f"{writer.json(schema, strict=tool.strict)} {after}"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None) if schema else None
        if not isinstance(values, list) or not values:
            return value_end
        choices = [literal(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for v in values]
        return f"({' | '.join(choices)}) {after}"
