"""Reads a call written as one JSON object: ``{"name": …, "arguments": {…}}``, in either order."""

from __future__ import annotations

import json
from collections.abc import Callable

from backends.local_engine.tool_formats.json_scanner import JsonScanner, Status

_BLANK = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Follows one object through text in pieces.

    Arguments are handed on as they come, in the model's own words, once the name is known. Arguments that are quoted
    JSON are unquoted; without any, or with null, they are ``{}``.

    Parameters
    ----------
    begin : called once, with the name; False if there is no such tool, which breaks the object
    arguments : called with each piece of the arguments' text

    Attributes
    ----------
    status : ``broken`` at the first character that makes it no call
    """

    def __init__(self, begin: Callable[[str], bool], arguments: Callable[[str], None]) -> None:
        self.status: Status = "open"
        self._begin = begin
        self._arguments = arguments
        self._state = "open"
        self._key = ""
        self._buffer = ""
        self._scanner = JsonScanner()
        self._name: str | None = None
        self._pending: str | None = None
        self._is_streaming = False
        self._has_arguments = False

    @property
    def is_in_arguments(self) -> bool:
        """Tell whether arguments have begun, and not ended."""
        return self._is_streaming

    def feed(self, text: str, start: int = 0) -> int:
        """Read on; return the index of the first character that is not part of the object."""
        at = start
        while at < len(text) and self.status == "open":
            if self._state in ("key", "value"):
                at = self._scan(text, at)
            elif text[at] in _BLANK:
                at += 1
            elif self._state == "value_start":
                self._start_value(text[at])
            elif self._take_mark(text[at]):
                at += 1
            else:
                self.status = "broken"
        return at

    def _take_mark(self, char: str) -> bool:
        """Take what stands between names and values; False if something else is due."""
        if self._state == "open" and char == "{":
            self._state = "first_key"
        elif char == '"' and self._state in ("first_key", "next_key"):
            self._scanner, self._buffer, self._state = JsonScanner(), "", "key"
            self._buffer += char
            self._scanner.feed(char)
        elif self._state == "colon" and char == ":":
            self._state = "value_start"
        elif self._state == "after" and char == ",":
            self._state = "next_key"
        elif self._state in ("after", "first_key") and char == "}":
            return self._close()
        else:
            return False
        return True

    def _scan(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        if self._is_streaming:
            if end > at:
                self._arguments(text[at:end])
        else:
            self._buffer += text[at:end]
        if self._scanner.status == "broken":
            self.status = "broken"
        elif self._scanner.status == "done":
            if self._state == "key":
                self._key, self._state = json.loads(self._buffer), "colon"
            elif self._end_value():
                self._state = "after"
            else:
                self.status = "broken"
        return end

    def _start_value(self, char: str) -> None:
        self._scanner, self._buffer, self._state = JsonScanner(), "", "value"
        if self._key not in _ARGUMENTS:
            return
        if self._has_arguments:
            self.status = "broken"
        elif char == "{" and self._name is not None:
            self._has_arguments = self._is_streaming = True
            if not self._begin(self._name):
                self._is_streaming, self.status = False, "broken"

    def _end_value(self) -> bool:
        """Make of a value that was read to its end what it stands for; False if it cannot be that."""
        if self._is_streaming:
            self._is_streaming = False
            return True
        if self._key == "name":
            name = json.loads(self._buffer)
            if not isinstance(name, str) or not name or self._name is not None:
                return False
            self._name = name
            return self._pending is None or self._hand_on(self._pending)
        if self._key in _ARGUMENTS:
            found = _object_text(self._buffer)
            if found is None:
                return False
            self._has_arguments, self._pending = True, found
            return self._name is None or self._hand_on(found)
        return True

    def _hand_on(self, arguments: str) -> bool:
        assert self._name is not None
        if not self._begin(self._name):
            return False
        self._arguments(arguments)
        return True

    def _close(self) -> bool:
        if self._name is None or (not self._has_arguments and not self._hand_on("{}")):
            return False
        self.status = "done"
        return True


def _object_text(value: str) -> str | None:
    """Return the JSON object that a value is, quotes or stands for by being null; None if it is none of these."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return None
    quoted: str = json.loads(value).strip() or "{}"
    scanner = JsonScanner()
    end = scanner.feed(quoted)
    return quoted if quoted.startswith("{") and scanner.status == "done" and end == len(quoted) else None
