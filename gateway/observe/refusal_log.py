"""Counts and logs requests that end without a row: what was asked, and why it was refused.

Whoever runs the gateway sees from it that a client uses a wrong path or an old key. Nobody can fill a disk with it:
lines are bounded in number, and what was not written is told of with the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from gateway.access.authenticator import KEY_PREFIX
from gateway.config.sections import LogConfig
from gateway.observe.log_writer import LogWriter, standard_error

OTHER = "other"
"""Endpoint of a path that there is none of: a path of the caller's is no label."""
NOT_HTTP = "none"
"""Endpoint of what is no HTTP request."""

# Lines at once, and a second after them.
_BURST = 50.0
_LINES_PER_S = 5.0
_MAX_PATH_CHARS = 200
_MAX_METHOD_CHARS = 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused request. ``path`` and ``method`` are the caller's own words, to be cleaned before they are shown."""

    method: str
    path: str
    endpoint: str
    status: int
    code: str
    request_id: str | None = None
    key_id: str | None = None


class RefusalLog:
    """Takes refusals from every endpoint.

    Parameters
    ----------
    config : ``format`` and ``level`` as everywhere
    count : takes endpoint and code
    writer : None for standard error's
    clock : monotonic, seconds
    """

    def __init__(
        self,
        config: LogConfig,
        count: Callable[[str, str], None],
        writer: LogWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._is_on = config.level in ("debug", "info")
        self._format = _json_line if config.format == "json" else _console_line
        self._writer = writer or standard_error()
        self._clock = clock
        self._num_free = _BURST
        self._last_s = clock()
        self._num_unlogged = 0

    def note(self, refusal: Refusal) -> None:
        """Count a refusal, and write its line where there is room for one."""
        self._count(refusal.endpoint, refusal.code)
        if not self._is_on:
            return
        now_s = self._clock()
        self._num_free = min(_BURST, self._num_free + (now_s - self._last_s) * _LINES_PER_S)
        self._last_s = now_s
        if self._num_free < 1.0:
            self._num_unlogged += 1
            return
        self._num_free -= 1.0
        num_unlogged, self._num_unlogged = self._num_unlogged, 0
        self._writer.put([self._format(_fields(refusal, num_unlogged))])


def clean_path(path: str) -> str:
    """Return a path as a log line may hold it: bounded, in one line, without a key."""
    shown = "".join(each if each.isprintable() else "?" for each in path[: _MAX_PATH_CHARS + 1])
    before, found, _ = shown.partition(KEY_PREFIX)
    if found:
        return f"{before}{found}…"
    return shown if len(shown) <= _MAX_PATH_CHARS else f"{shown[:_MAX_PATH_CHARS]}…"


def _fields(refusal: Refusal, num_unlogged: int) -> dict[str, Any]:
    fields = {
        "method": "".join(each if each.isprintable() else "?" for each in refusal.method[:_MAX_METHOD_CHARS]),
        "path": clean_path(refusal.path),
        "status": refusal.status,
        "code": refusal.code,
        "key_id": refusal.key_id,
        "request_id": refusal.request_id,
    }
    return fields | ({"num_unlogged": num_unlogged} if num_unlogged else {})


def _json_line(fields: Mapping[str, Any]) -> str:
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": moment, "level": "info", "logger": "suffice.refused", "message": "refused"}
    return orjson.dumps({**line, **fields}).decode()


def _console_line(fields: Mapping[str, Any]) -> str:
    said = [f"{name}={value}" for name, value in fields.items() if name not in ("method", "path") and value is not None]
    return f"{datetime.now():%H:%M:%S} refused {fields['method']} {fields['path']} {' '.join(said)}"
