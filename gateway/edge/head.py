"""Reads a request's headers in one pass and settles duplicates."""

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
_NOTHING: Mapping[str, str] = {}


@dataclass(slots=True)
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
    kept: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] | None = None
    for name, value in headers:
        if name in _KEPT:
            found = kept
        elif name.startswith(_PREFIX):
            found = own = {} if own is None else own
            if len(value) > _MAX_VALUE_BYTES:
                raise InvalidRequest(f"The header {_quote(name)} is longer than {_MAX_VALUE_BYTES} bytes.")
        else:
            continue
        if found.setdefault(name, value) != value:
            raise InvalidRequest(f"The header {_quote(name)} was given twice with different values.")
    # A bearer token has its own check; a long origin or trace context is only quoted or dropped.
    authorization, origin, length = kept.get(b"authorization"), kept.get(b"origin"), kept.get(b"content-length")
    trace = kept.get(b"traceparent")
    return Head(
        None if authorization is None else authorization.decode("latin-1"),
        # The server has refused malformed lengths already; a missing one means a chunked body.
        int(length) if length is not None and length.isdigit() else None,
        None if trace is None else _traceparent(trace),
        None if origin is None else origin.decode("latin-1"),
        _NOTHING if own is None else _overrides(own),
    )


def _overrides(found: Mapping[bytes, bytes]) -> dict[str, str]:
    overrides = {}
    for name, value in found.items():
        key = _quote(name[len(_PREFIX) :])
        if key not in _OURS:
            known = ", ".join(f"x-suffice-{each}" for each in sorted(_OURS))
            raise InvalidRequest(f"The header x-suffice-{shorten(key)} is unknown; known are {known}.")
        overrides[key.replace("-", "_")] = value.decode("latin-1").strip()
    return overrides


def _traceparent(value: bytes) -> str | None:
    """A malformed trace context is dropped, as W3C Trace Context section 4.3 asks."""
    if len(value) > _MAX_VALUE_BYTES:
        return None
    text = value.decode("latin-1").strip()
    return text if _TRACEPARENT.fullmatch(text) and not text.startswith("ff") else None


def _quote(name: bytes) -> str:
    return shorten(name.decode("latin-1"))
