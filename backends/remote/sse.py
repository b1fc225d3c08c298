"""Parses server-sent events as they come: bytes in, at any split, whole events out.

Follows the "event stream interpretation" of the HTML Living Standard, §9.2.6, for the fields ``data`` and ``event``;
``id`` and ``retry`` have no meaning for a request that is never resumed. Payloads stay bytes: they are UTF-8 JSON, and
the JSON reader checks both at once.
"""

from __future__ import annotations

from typing import NamedTuple


class SSEvent(NamedTuple):
    """Holds one dispatched event; ``event`` is empty for the default kind."""

    data: bytes
    event: bytes = b""


class EventTooLarge(Exception):
    """A line or event passed the limit; a server that never ends a line must not fill our memory."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"A server-sent event passed {limit_bytes} bytes.")
        self.limit_bytes = limit_bytes


class SSEParser:
    """Collect bytes into events.

    Parameters
    ----------
    max_event_bytes : most bytes of one line, and of one event's data

    Examples
    --------
    >>> parser = SSEParser()
    >>> parser.feed(b"data: on")
    []
    >>> parser.feed(b"e\\n\\n")
    [SSEvent(data=b'one', event=b'')]
    """

    def __init__(self, *, max_event_bytes: int = 8 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        # The unfinished line in pieces: joined once, when its end arrives, so tiny reads stay linear.
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._event = b""
        self._skip_newline = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[SSEvent]:
        """Take the next bytes and return the events they complete.

        Raises
        ------
        EventTooLarge : a line or event passed ``max_event_bytes``
        """
        if not chunk:
            return []
        if self._skip_newline and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        # A carriage return ends a line at once; a newline right after it, even in the next read, belongs to it.
        self._skip_newline = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = chunk.split(b"\n")
        events: list[SSEvent] = []
        for line in lines:
            if self._pieces:
                line = b"".join((*self._pieces, line))
                self._pieces.clear()
                self._pieces_bytes = 0
            self._take_line(line, events)
        if rest:
            self._pieces.append(rest)
            self._pieces_bytes += len(rest)
            self._check(self._pieces_bytes)
        return events

    def end(self) -> list[SSEvent]:
        """Return what the stream's end leaves: at most one event, from a server that omits the last blank line."""
        events: list[SSEvent] = []
        if self._pieces:
            line = b"".join(self._pieces)
            self._pieces.clear()
            self._take_line(line, events)
        self._dispatch(events)
        return events

    def _take_line(self, line: bytes, events: list[SSEvent]) -> None:
        if self._at_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        if not line:
            self._dispatch(events)
            return
        self._check(len(line))
        name, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value)
            self._check(self._data_bytes)
        elif name == b"event":
            self._event = value

    def _dispatch(self, events: list[SSEvent]) -> None:
        if self._data:
            events.append(SSEvent(b"\n".join(self._data), self._event))
            self._data.clear()
            self._data_bytes = 0
        self._event = b""

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_event_bytes:
            raise EventTooLarge(self._max_event_bytes)
