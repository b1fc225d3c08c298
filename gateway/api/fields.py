"""Checks of single JSON values: each takes a value and its name, gives the checked value or names what is wrong.

What a check lets through is noted beside it as JSON Schema, so that the API's description says what the checks do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from gateway.errors import InvalidRequest, shorten

_MAX_MOMENT_CHARS = 40
_MAX_AMOUNT_CHARS = 32
_MOST_USD = 1_000_000_000
_NANO = Decimal("0.000000001")

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


def open_object(properties: Mapping[str, Schema], *, required: tuple[str, ...]) -> dict[str, Any]:
    """The JSON Schema of a body in OpenAI's manner: null means "not given", and unknown fields are tolerated."""
    optional = {
        name: each if name in required else {"anyOf": [each, {"type": "null"}]} for name, each in properties.items()
    }
    return {"type": "object", "properties": optional, "required": list(required)}


def kind_of(value: Any) -> str:
    """A JSON value's type, as messages name it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((str, "a string"), (int, "an integer"), (float, "a number"), (list, "an array")):
        if isinstance(value, kind):
            return name
    return "an object"


def wrong_type(param: str, expected: str, value: Any) -> InvalidRequest:
    """The error for a value of the wrong JSON type."""
    return InvalidRequest(
        f"Invalid type for '{param}': expected {expected}, got {kind_of(value)}.", param=param, code="invalid_type"
    )


def wrong_value(param: str, expected: str, value: Any) -> InvalidRequest:
    """The error for a value of the right type that is not permitted."""
    return InvalidRequest(f"Invalid value for '{param}': expected {expected}, got {shorten(repr(value))}.", param=param)


def number(low: float, high: float) -> Check:
    """A JSON number in ``[low, high]``, as float. NaN and infinities never get past the JSON parser."""

    @lets_through({"type": "number", "minimum": low, "maximum": high})
    def check(value: Any, param: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(param, "a number", value)
        if not low <= value <= high:
            raise wrong_value(param, f"a number from {low:g} to {high:g}", value)
        return float(value)

    return check


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


def strings(max_items: int, max_chars: int) -> Check:
    """A string, or an array of non-empty strings, as a tuple."""

    one = {"type": "string", "minLength": 1, "maxLength": max_chars}

    @lets_through({"anyOf": [one, {"type": "array", "items": one, "maxItems": max_items}]})
    def check(value: Any, param: str) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise wrong_type(param, "a string or an array of strings", value)
        if len(items) > max_items:
            raise wrong_value(param, f"at most {max_items} strings", f"{len(items)} strings")
        for place, item in enumerate(items):
            where = param if isinstance(value, str) else f"{param}[{place}]"
            if not isinstance(item, str):
                raise wrong_type(where, "a string", item)
            if not 0 < len(item) <= max_chars:
                raise wrong_value(where, f"1 to {max_chars} characters", f"{len(item)} characters")
        return tuple(items)

    return check


def token_ids(max_items: int) -> Check:
    """An array of token ids, as a tuple."""

    @lets_through(
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "maxItems": max_items}
    )
    def check(value: Any, param: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise wrong_type(param, "an array of token ids", value)
        if len(value) > max_items:
            raise wrong_value(param, f"at most {max_items} token ids", f"{len(value)} ids")
        for place, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int):
                raise wrong_type(f"{param}[{place}]", "a token id", item)
            if not 0 <= item < 2**31:
                raise wrong_value(f"{param}[{place}]", "a token id from 0", item)
        return tuple(value)

    return check


def biases(max_items: int) -> Check:
    """OpenAI's ``logit_bias``: token id (as a string) to a bias from -100 to 100."""
    bias = number(-100, 100)

    @lets_through(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": schema_of(bias),
            "maxProperties": max_items,
        }
    )
    def check(value: Any, param: str) -> dict[int, float]:
        table = mapping(value, param)
        if len(table) > max_items:
            raise wrong_value(param, f"at most {max_items} entries", f"{len(table)} entries")
        checked = {}
        for key, each in table.items():
            # isdecimal() alone would let other scripts' digits through.
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise wrong_value(param, "token ids as keys", key)
            checked[int(key)] = bias(each, f"{param}.{key}")
        return checked

    return check


def arrays_of(item: Check, *, max_items: int, min_items: int = 0) -> Check:
    """An array whose every item passes a check, as a tuple."""

    @lets_through({"type": "array", "items": schema_of(item), "minItems": min_items, "maxItems": max_items})
    def check(value: Any, param: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise wrong_type(param, "an array", value)
        if not min_items <= len(value) <= max_items:
            raise wrong_value(param, f"{min_items} to {max_items} items", f"{len(value)} items")
        return tuple([item(each, f"{param}[{place}]") for place, each in enumerate(value)])

    return check


def nullable(inner: Check) -> Check:
    """Null, or what another check lets through."""

    @lets_through({"anyOf": [schema_of(inner), {"type": "null"}]})
    def check(value: Any, param: str) -> Any:
        return None if value is None else inner(value, param)

    return check


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


def amount(value: Any, param: str) -> Decimal:
    """Dollars, 0 or more, exact to a billionth; a decimal string, or a number, which is read as it is written."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong_type(param, "an amount of dollars", value)
    try:
        parsed = Decimal(str(value)) if len(str(value)) <= _MAX_AMOUNT_CHARS else Decimal("NaN")
    except InvalidOperation:
        parsed = Decimal("NaN")
    if not parsed.is_finite() or not 0 <= parsed <= _MOST_USD or parsed != parsed.quantize(_NANO):
        raise wrong_value(param, "an amount of dollars from 0 with at most 9 decimals", value)
    return parsed


lets_through({"anyOf": [{"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}, {"type": "number", "minimum": 0}]})(
    amount
)
