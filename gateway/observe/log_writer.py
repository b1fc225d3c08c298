"""Writes log lines in a thread of its own, so that whoever does not read them stops nobody.

A pipe holds some 64 KB. Once it is full, a write into it waits until its reader reads; on the event loop's thread that
would be the end of all requests. Lines wait here instead, in bounded memory. What has no room is dropped and counted,
and the number is written as soon as somebody reads again.

What this does not protect: lines that wait are lost when the process is killed.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TextIO

import orjson

# Some 10,000 lines of requests.
_MAX_CHARS = 8_000_000
# Between two writes: under load many lines share one, and the thread seldom takes the interpreter from the others.
_LINGER_S = 0.05
# At the end of the process a reader that reads gets all; one that does not is waited for no longer.
_LAST_LINES_S = 2.0


class LogWriter:
    """Takes lines from any thread and never waits.

    Parameters
    ----------
    stream : None for standard error, looked up at each write
    max_chars : most that waits to be written
    linger_s : least time between two writes
    """

    def __init__(
        self, stream: TextIO | None = None, *, max_chars: int = _MAX_CHARS, linger_s: float = _LINGER_S
    ) -> None:
        self.describe_loss: Callable[[int], str] = json_loss
        self._stream = stream
        self._max_chars = max_chars
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._num_chars = 0
        self._num_dropped = 0
        self._num_told = 0
        self._thread: threading.Thread | None = None

    @property
    def num_dropped(self) -> int:
        """Return how many lines had no room."""
        return self._num_dropped

    def put(self, lines: Sequence[str]) -> None:
        """Queue lines, or drop them where too much waits already."""
        num_chars = sum(map(len, lines)) + len(lines)
        with self._changed:
            if self._num_chars + num_chars > self._max_chars:
                self._num_dropped += len(lines)
                return
            self._waiting.extend(lines)
            self._num_chars += num_chars
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="suffice-log-lines", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float = _LAST_LINES_S) -> bool:
        """Wait until everything is written, no longer than told; return whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_chars, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                lines, self._waiting = self._waiting, []
            num_chars = sum(map(len, lines)) + len(lines)
            if self._write("\n".join([*lines, ""])):
                self._tell_loss()
            else:
                # Standard error is closed; the decision log has the rows.
                self._num_dropped += len(lines)
            with self._changed:
                self._num_chars -= num_chars
                self._changed.notify_all()
            time.sleep(self._linger_s)

    def _tell_loss(self) -> None:
        """Say how many lines were dropped since it was last said: somebody reads again."""
        num_dropped = self._num_dropped
        if num_dropped > self._num_told and self._write(self.describe_loss(num_dropped - self._num_told) + "\n"):
            self._num_told = num_dropped

    def _write(self, text: str) -> bool:
        stream = self._stream or sys.stderr
        try:
            # Not through the stream's own buffer: its lock would be held while the reader sleeps, also at exit.
            number = stream.fileno()
        except (OSError, ValueError):
            return _write_to(stream, text)
        return _write_all(number, text.encode(errors="backslashreplace"))


def _write_to(stream: TextIO, text: str) -> bool:
    """Write to what has no file below it."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _write_all(number: int, data: bytes) -> bool:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(number, left) :]
        except BlockingIOError:
            select.select([], [number], [])
        except OSError:
            return False
    return True


def json_loss(num_lines: int) -> str:
    """Return the line that says how many were dropped, as JSON."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": moment, "level": "warning", "logger": "suffice.log", "message": _loss(num_lines)}
    return orjson.dumps(line | {"num_dropped": num_lines}).decode()


def console_loss(num_lines: int) -> str:
    """Return the same for people."""
    return f"{datetime.now():%H:%M:%S} warning suffice.log {_loss(num_lines)}"


def _loss(num_lines: int) -> str:
    return f"{num_lines} log lines were dropped: nobody read them"


@functools.cache
def standard_error() -> LogWriter:
    """Return the process's writer to standard error, which all its log lines share."""
    writer = LogWriter()
    atexit.register(writer.flush)
    return writer
