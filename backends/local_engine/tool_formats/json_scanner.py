"""Follows one JSON value through text that comes in pieces, and knows where it ends."""

from __future__ import annotations

import re
from typing import Literal

Status = Literal["open", "done", "broken"]

_BLANK = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")


class JsonScanner:
    """Reads one value, character by character in effect, so that it does not matter where pieces are cut.

    Attributes
    ----------
    status : ``done`` once the value's last character was read; a number at the top is only done with what follows it
    """

    def __init__(self) -> None:
        self.status: Status = "open"
        self._stack: list[str] = []
        self._state = "value"
        # Of a number or literal the text so far, of an escape the digits still to come.
        self._word = ""
        self._num_hex = 0

    def feed(self, text: str, start: int = 0) -> int:
        """Read on; return the index of the first character that is not part of the value."""
        at = start
        while at < len(text) and self.status == "open":
            if self._state in ("string", "key_string"):
                plain = _PLAIN.match(text, at)
                assert plain is not None, "it matches nothing at least"
                at = plain.end()
                if at == len(text):
                    break
            if self._step(text[at]):
                at += 1
        return at

    def _step(self, char: str) -> bool:
        """Take one character; False if it is not part of what was being read."""
        state = self._state
        if state in ("string", "key_string"):
            return self._in_string(char)
        if state in ("escape", "key_escape"):
            return self._in_escape(char)
        if state == "word":
            return self._in_word(char)
        if char in _BLANK:
            # The value has not begun, or is not over.
            return True
        return self._between(char)

    def _in_string(self, char: str) -> bool:
        is_key = self._state == "key_string"
        if char == '"':
            if is_key:
                self._state = "colon"
            else:
                self._end_value()
        elif char == "\\":
            self._state = "key_escape" if is_key else "escape"
        else:
            return self._break()
        return True

    def _in_escape(self, char: str) -> bool:
        if self._num_hex:
            if char not in "0123456789abcdefABCDEF":
                return self._break()
            self._num_hex -= 1
        elif char == "u":
            self._num_hex = 4
        elif char not in '"\\/bfnrt':
            return self._break()
        if not self._num_hex:
            self._state = "key_string" if self._state == "key_escape" else "string"
        return True

    def _in_word(self, char: str) -> bool:
        if char.isalnum() or char in "+-.":
            self._word += char
            # Nothing longer is a number that anyone means, and a literal is five characters at most.
            return len(self._word) <= 400 or self._break()
        if self._word in _LITERALS or _NUMBER.fullmatch(self._word):
            self._end_value()
            return False
        return self._break()

    def _between(self, char: str) -> bool:
        state = self._state
        if state == "value" or (state == "first_item" and char != "]"):
            return self._begin_value(char)
        if state == "colon" and char == ":":
            self._state = "value"
        elif state in ("key", "first_key") and char == '"':
            self._state = "key_string"
        elif state == "after" and char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif (state in ("after", "first_key") and char == "}" and self._stack[-1] == "{") or (
            state in ("after", "first_item") and char == "]" and self._stack[-1] == "["
        ):
            self._stack.pop()
            self._end_value()
        else:
            return self._break()
        return True

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._state = "string"
        elif char == "{":
            self._stack.append(char)
            self._state = "first_key"
        elif char == "[":
            self._stack.append(char)
            self._state = "first_item"
        elif char in "-0123456789tfn":
            self._state, self._word = "word", char
        else:
            return self._break()
        return True

    def _end_value(self) -> None:
        self._state = "after"
        if not self._stack:
            self.status = "done"

    def _break(self) -> bool:
        self.status = "broken"
        return False
