"""The formats of Mistral: ``[TOOL_CALLS]`` before an array of calls, or before each name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence

from backends.local_engine.tool_formats.call_parser import CallParser
from backends.local_engine.tool_formats.grammar_writer import GrammarWriter, literal
from backends.local_engine.tool_formats.json_call import JsonCall
from backends.local_engine.tool_formats.json_scanner import JsonScanner
from backends.local_engine.tool_formats.tool_format import arguments_of, to_json
from backends.protocol import Tool, ToolCall

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

# What stands between the marker and the arguments; the id is the model's own, ours is another.
_HEADER = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]*\s*)?(?:\[ARGS\]\s*)?")
_HEADER_CHARS = 400
_TEMPLATE_ID = re.compile(r"[A-Za-z0-9]{9}")
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class MistralParser(CallParser):
    """Parses one answer, in whichever of the two forms it is."""

    begins_with = BEGIN

    def marker(self, marker: str) -> None:
        if marker != BEGIN and self._state == self._header:
            self.text(marker)
        else:
            super().marker(marker)

    def _start(self, marker: str) -> None:
        self._raw = marker
        self._state = self._opening

    def _opening(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == "[":
            self._state = self._item
            return at + 1
        self._name, self._state = "", self._header
        return at

    def _item(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        self._call, self._state = JsonCall(self._begin, self._arguments), self._object
        return at

    def _object(self, text: str, at: int) -> int:
        end = self._call.feed(text, at)
        if self._call.status == "done":
            self._state, self._raw = self._between, ""
        elif self._call.status == "broken":
            self._break_off(text[at:end], in_arguments=self._call.is_in_arguments)
        return end

    def _between(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == ",":
            self._state = self._item
        elif text[at] == "]":
            self._raw, self._state = None, self._outside
        else:
            self._give_up()
            return at
        return at + 1

    def _header(self, text: str, at: int) -> int:
        if text[at] == "{":
            header = _HEADER.fullmatch(self._name)
            if header is None:
                self._give_up()
                return at
            self._begin(header[1])
            self._scanner, self._state = JsonScanner(), self._object_alone
            return at
        self._name += text[at]
        if len(self._name) > _HEADER_CHARS:
            self._give_up(text[at])
        return at + 1

    def _object_alone(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self._arguments(text[at:end])
        if self._scanner.status != "open":
            self._state = self._outside if self._scanner.status == "done" else self._broken
        return end


class MistralFormat:
    """``[TOOL_CALLS][{"name": "f", "arguments": {}}]``, or ``[TOOL_CALLS]f[ARGS]{}`` where ``has_args``."""

    markers: tuple[str, ...] = (BEGIN, ARGS, CALL_ID)
    name = "mistral"

    def fits(self, template: str, has_token: Callable[[str], bool]) -> bool:
        return BEGIN in template or has_token(BEGIN)

    def parser(self, tools: Sequence[Tool], tokens: Collection[str]) -> CallParser:
        return MistralParser(tokens)

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = [to_json({"name": call.name, "arguments": arguments_of(call)}) for call in calls]
        return f"{BEGIN}[{', '.join(objects)}]"

    def call_id(self, call_id: str) -> str:
        """Return nine letters and digits, which are what Mistral's templates take for an id."""
        if _TEMPLATE_ID.fullmatch(call_id):
            return call_id
        digest = hashlib.sha256(call_id.encode("utf-8", "replace")).digest()
        return "".join([_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:9]])

    def grammar(self, tools: Sequence[Tool], writer: GrammarWriter, *, parallel: bool) -> str:
        if writer.has_token(ARGS):
            args = writer.marker(ARGS)
            objects = [writer.new(f"{literal(tool.name)} {args} {writer.arguments(tool)}") for tool in tools]
            call = writer.new(" | ".join(objects))
            return writer.answer(BEGIN, call + (f" ({writer.marker(BEGIN)} {call})*" if parallel else ""))
        call = writer.new(" | ".join([writer.json_call(tool, "arguments") for tool in tools]))
        more = f' (", " {call})*' if parallel else ""
        return writer.answer(BEGIN, f'/ ?/ "[" {call}{more} "]"')
