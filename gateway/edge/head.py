"""What a request's headers say, read in one pass, duplicates settled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.errors import InvalidRequest, shorten

_PREFIX = b"x-suffice-"
_OURS = frozenset(
    {"tier", "min-tier", "max-tier", "explore", "session-id", "policy", "priority", "regions", "max-cost-usd"}
)
_KEPT = frozenset({b"authorization", b"content-length", b"traceparent", b"origin"})
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_VALUE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Head:
    """``suffice`` holds the ``x-suffice-*`` request headers without their prefix, dashes as underscores."""

    authorization: str | None = None
    content_length: int | None = None
    traceparent: str | None = None
    origin: str | None = None
    suffice: Mapping[str, str] = field(default_factory=dict)


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> Head:
    """Pick the headers the gateway acts on; names arrive in lower case.

    Raises
    ------
    InvalidRequest
        One of them given twice with different values, too long, or (``x-suffice-*`` only) unknown.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _KEPT or name.startswith(_PREFIX):
            if found.setdefault(name, value) != value:
                raise InvalidRequest(f"The header {_quote(name)} was given twice with different values.")
            # A bearer token has its own check; a long origin or trace context is only quoted or dropped.
            if len(value) > _MAX_VALUE_BYTES and name.startswith(_PREFIX):
                raise InvalidRequest(f"The header {_quote(name)} is longer than {_MAX_VALUE_BYTES} bytes.")
    if not found:
        return Head()
    return Head(
        authorization=_text(found.get(b"authorization")),
        content_length=_content_length(found.get(b"content-length")),
        traceparent=_traceparent(found.get(b"traceparent")),
        origin=_text(found.get(b"origin")),
        suffice=_overrides(found),
    )


def _overrides(found: Mapping[bytes, bytes]) -> dict[str, str]:
    overrides = {}
    for name, value in found.items():
        if name.startswith(_PREFIX):
            key = _quote(name[len(_PREFIX) :])
            if key not in _OURS:
                known = ", ".join(f"x-suffice-{each}" for each in sorted(_OURS))
                raise InvalidRequest(f"The header x-suffice-{shorten(key)} is unknown; known are {known}.")
            overrides[key.replace("-", "_")] = value.decode("latin-1").strip()
    return overrides


def _content_length(value: bytes | None) -> int | None:
    # The server has refused malformed lengths already; a missing one means a chunked body.
    return int(value) if value is not None and value.isdigit() else None


def _traceparent(value: bytes | None) -> str | None:
    """A malformed trace context is dropped, as W3C Trace Context section 4.3 asks."""
    if value is None or len(value) > _MAX_VALUE_BYTES:
        return None
    text = value.decode("latin-1").strip()
    return text if _TRACEPARENT.fullmatch(text) and not text.startswith("ff") else None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _quote(name: bytes) -> str:
    return shorten(name.decode("latin-1"))
