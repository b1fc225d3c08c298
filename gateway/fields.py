"""Checks of single JSON values: each takes a value and its name, gives the checked value or names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.body import kind_of
from gateway.errors import InvalidRequest, shorten

Check = Callable[[Any, str], Any]


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

    def check(value: Any, param: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(param, "a number", value)
        if not low <= value <= high:
            raise wrong_value(param, f"a number from {low:g} to {high:g}", value)
        return float(value)

    return check


def integer(low: int, high: int) -> Check:
    """A JSON integer in ``[low, high]``; 3.0 and true are none."""

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


def boolean(value: Any, param: str) -> bool:
    """A JSON boolean."""
    if not isinstance(value, bool):
        raise wrong_type(param, "a boolean", value)
    return value


def string(max_chars: int, *, min_chars: int = 0) -> Check:
    """A JSON string of limited length."""

    def check(value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(param, "a string", value)
        if not min_chars <= len(value) <= max_chars:
            raise wrong_value(param, f"{min_chars} to {max_chars} characters", f"{len(value)} characters")
        return value

    return check


def one_of(*known: str) -> Check:
    """One of some strings."""

    def check(value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(param, "a string", value)
        if value not in known:
            raise wrong_value(param, "one of " + ", ".join(map(repr, known)), value)
        return value

    return check


def mapping(value: Any, param: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return value


def strings(max_items: int, max_chars: int) -> Check:
    """A string, or an array of non-empty strings, as a tuple."""

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
