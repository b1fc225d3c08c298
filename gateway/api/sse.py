"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"

PING = b": ping\n\n"
"""A comment that keeps a silent stream alive."""

HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold tokens back until its buffer is full.
    (b"x-accel-buffering", b"no"),
]


def event(json: bytes) -> bytes:
    """One event; JSON has no raw line breaks, so one data line holds it."""
    return b"data: " + json + b"\n\n"


def comment(json: bytes) -> bytes:
    """A comment: clients skip it, people and proxies may read it."""
    return b": suffice " + json + b"\n\n"


def error(told: Mapping[str, Any]) -> bytes:
    """OpenAI's error object as a stream's last event.

    No ``[DONE]`` follows: what was cut off must not look complete.
    """
    return event(orjson.dumps({"error": told}))
