"""Takes tool calls out of an answer as it is written; each format derives its parser from this one.

What comes out does not depend on where the text was cut. Once a call has begun its name is out, and what follows up to
its end is arguments, in the model's own words if they are no JSON. What turns out to be no call before that is text.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection

from backends.protocol import ToolCallDelta

Piece = str | ToolCallDelta
"""Text, or a piece of a call."""


def new_call_id() -> str:
    """Return an id that no other call has, of whatever request: clients and other models tell calls by it."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallParser:
    """Parses one answer.

    Blanks between text and a call belong to neither.

    Parameters
    ----------
    tokens : the texts of markers that are tokens of the vocabulary: they come by :meth:`marker`, and text that merely
        looks like one is text; the other markers are looked for in the text
    new_id : makes the calls' ids

    Attributes
    ----------
    num_calls : calls that have begun
    """

    def __init__(self, tokens: Collection[str] = (), *, new_id: Callable[[], str] = new_call_id) -> None:
        self.num_calls = 0
        self._tokens = tokens
        self._new_id = new_id
        self._out: list[Piece] = []
        self._state: Callable[[str, int], int] = self._outside
        self._blank = ""
        self._follows_text = False
        # What was read of a call that has not begun, in case it is none; of text, what may turn out to be a marker.
        self._raw: str | None = None
        self._held = ""

    # Where calls begin and end in a format's text; empty where nothing marks it.
    begins_with = ""
    ends_with = ""

    @property
    def in_call(self) -> bool:
        """Tell whether the last character was part of a call, or of what may become one."""
        return self._state != self._outside

    def text(self, text: str) -> None:
        """Read on."""
        at = 0
        while at < len(text):
            is_recording, num_calls = self._raw is not None, self.num_calls
            end = self._state(text, at)
            if is_recording and self._raw is not None and self.num_calls == num_calls:
                self._raw += text[at:end]
            at = end

    def marker(self, marker: str) -> None:
        """Read a token that is a marker."""
        self._show_held()
        if marker == self.begins_with:
            self._drop_call()
            self._start(marker)
        elif self.in_call:
            if self._raw is not None:
                self._raw += marker
            self._drop_call()
        else:
            self._show(marker)

    def finish(self) -> None:
        """End the answer: show what was held back. A call that is cut off stays as it is."""
        self._show_held()
        self._drop_call()
        if self._blank and (not self.num_calls or self._follows_text):
            self._out.append(self._blank)
        self._blank = ""

    def take(self) -> list[Piece]:
        """Return what came out since the last call of this, neighbours joined."""
        joined: list[Piece] = []
        for piece in self._out:
            last = joined[-1] if joined else None
            if isinstance(piece, str) and isinstance(last, str):
                joined[-1] = last + piece
            elif isinstance(piece, ToolCallDelta) and isinstance(last, ToolCallDelta) and not piece.name:
                arguments = last.arguments + piece.arguments
                joined[-1] = ToolCallDelta(last.index, last.call_id, last.name, arguments)
            else:
                joined.append(piece)
        self._out.clear()
        return joined

    # For the formats

    def _start(self, marker: str) -> None:
        """Begin to read a call, after its marker."""
        raise NotImplementedError

    def _outside(self, text: str, at: int) -> int:
        if not self.begins_with or self.begins_with in self._tokens:
            self._show(text[at:])
            return len(text)
        before, end, is_found = self._search(self.begins_with, text, at)
        self._show(before)
        if is_found:
            self._start(self.begins_with)
        return end

    def _closing(self, text: str, at: int) -> int:
        """Read the end marker of a call that is complete; one that does not come is not missed."""
        if self.ends_with in self._tokens:
            if text[at].isspace():
                return at + 1
            self._state = self._outside
            return at
        self._held += text[at]
        marker = self._held.lstrip()
        if marker == self.ends_with:
            self._held, self._state = "", self._outside
        elif not self.ends_with.startswith(marker):
            self._state, rest, self._held = self._outside, self._held, ""
            # It may hold the beginning of the next call.
            self.text(rest)
        return at + 1

    def _broken(self, text: str, at: int) -> int:
        """Read arguments that are no JSON, up to the call's end."""
        marker = self.ends_with or self.begins_with
        if not marker or marker in self._tokens:
            self._arguments(text[at:])
            return len(text)
        before, end, is_found = self._search(marker, text, at)
        self._arguments(before)
        if is_found:
            self._state = self._outside
            if not self.ends_with:
                self._start(marker)
        return end

    def _begin(self, name: str) -> bool:
        """Begin a call. The blanks before it are forgotten."""
        self._blank, self._raw, self._follows_text = "", None, False
        self._out.append(ToolCallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        return True

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(ToolCallDelta(self.num_calls - 1, arguments=text))

    def _give_up(self, rest: str = "") -> None:
        """Show as text what is no call after all, ``rest`` being what this step has read of it."""
        text, self._raw = (self._raw or "") + rest, None
        self._state = self._outside
        self._show(text)

    def _break_off(self, read: str, *, in_arguments: bool) -> None:
        """Go on after something that is no JSON; ``read`` is what this step has read of it."""
        if self._raw is not None:
            self._give_up(read)
        else:
            self._state = self._broken if in_arguments else self._outside

    def _drop_call(self) -> None:
        """Stop reading a call that is not complete."""
        if self._raw is not None:
            self._give_up()
        self._state = self._outside

    def _show(self, text: str) -> None:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._out.append(shown)
            self._follows_text = True

    def _show_held(self) -> None:
        """Take what was held back for what it is, no marker having come of it."""
        held, self._held = self._held, ""
        if not held:
            return
        if self._state == self._broken:
            self._arguments(held)
        elif self._state == self._closing:
            # Of the end marker of a complete call a part is missing, which is no text.
            self._state = self._outside
        elif self._raw is not None:
            self._raw += held
        else:
            self._show(held)

    def _search(self, marker: str, text: str, at: int) -> tuple[str, int, bool]:
        """Look for a marker; what may be the beginning of one at the end of the text is held back.

        Returns
        -------
        The text before it, the index after it, and whether it was found
        """
        whole = self._held + text[at:]
        place = whole.find(marker)
        if place >= 0:
            end = at + place + len(marker) - len(self._held)
            self._held = ""
            return whole[:place], end, True
        keep = _overlap(whole, marker)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], len(text), False


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that begins a marker, and is not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
