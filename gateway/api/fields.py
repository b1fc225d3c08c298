"""Checks of single JSON values: each takes a value and its name, gives the checked value or names what is wrong.

What a check lets through is noted beside it as JSON Schema, so that the API's description says what the checks do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from gateway.api.declaration import wrong_type, wrong_value

_MAX_MOMENT_CHARS = 40

Check = Callable[[Any, str], Any]
Schema = Mapping[str, Any]

F = TypeVar("F", bound=Callable[..., Any])


def lets_through(schema: Schema) -> Callable[[F], F]:
    """Note what a check lets through; methods may be checks too."""

    def note(check: F) -> F:
        check.__dict__["schema"] = schema
        return check

    return note


def schema_of(check: Check) -> dict[str, Any]:
    """The JSON Schema of what a check lets through."""
    return dict(check.schema)  # type: ignore[attr-defined]


def integer(low: int, high: int) -> Check:
    """A JSON integer in ``[low, high]``; 3.0 and true are none."""

    @lets_through({"type": "integer", "minimum": low, "maximum": high})
    def check(value: Any, param: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            if isinstance(value, float) and abs(value) >= 2**63:
                # The parser gives integers beyond 64 bits as floats: too large, not of the wrong type.
                raise wrong_value(param, f"an integer from {low} to {high}", value)
            raise wrong_type(param, "an integer", value)
        if not low <= value <= high:
            raise wrong_value(param, f"an integer from {low} to {high}", value)
        return value

    return check


@lets_through({"type": "boolean"})
def boolean(value: Any, param: str) -> bool:
    """A JSON boolean."""
    if not isinstance(value, bool):
        raise wrong_type(param, "a boolean", value)
    return value


def string(max_chars: int, *, min_chars: int = 0) -> Check:
    """A JSON string of limited length."""

    @lets_through({"type": "string", "minLength": min_chars, "maxLength": max_chars})
    def check(value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(param, "a string", value)
        if not min_chars <= len(value) <= max_chars:
            raise wrong_value(param, f"{min_chars} to {max_chars} characters", f"{len(value)} characters")
        return value

    return check


def one_of(*known: str) -> Check:
    """One of some strings."""

    @lets_through({"type": "string", "enum": list(known)})
    def check(value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(param, "a string", value)
        if value not in known:
            raise wrong_value(param, "one of " + ", ".join(map(repr, known)), value)
        return value

    return check


@lets_through({"type": "object"})
def mapping(value: Any, param: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return value


def moment(value: Any, param: str) -> datetime:
    """RFC 3339 text with a zone, as an aware datetime."""
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    try:
        parsed = datetime.fromisoformat(value) if len(value) <= _MAX_MOMENT_CHARS else None
    except ValueError:
        parsed = None
    if parsed is None or parsed.tzinfo is None:
        raise wrong_value(param, "a moment such as 2026-01-31T12:00:00Z", value)
    return parsed


lets_through({"type": "string", "format": "date-time"})(moment)
