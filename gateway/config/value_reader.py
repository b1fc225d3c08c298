"""Reads one written value as the type that its setting is declared with.

:func:`convert` is :func:`msgspec.convert` with the rules of a configuration on top: numbers are finite, and what does
not fit is explained in words.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec


class Mismatch(Exception):
    """The value has not the declared type; ``expected`` says in words what it should be."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def convert(value: Any, annotation: Any) -> Any:
    """Return a TOML or JSON value as the annotated type; only what loses nothing is converted.

    Raises
    ------
    Mismatch
        The value is of another type, is not a choice, or is not finite.
    """
    if Any in get_args(annotation):
        # Such a table is sent on as JSON, which knows no exact decimals.
        value = _without_decimals(value)
    try:
        # A table's keys are strings in TOML and JSON, whatever type they are declared with.
        converted = msgspec.convert(value, annotation, str_keys=True, dec_hook=_read_path)
    except msgspec.ValidationError:
        raise Mismatch(expectation(annotation)) from None
    if not (_is_finite(converted) or Any in get_args(annotation)):
        raise Mismatch(expectation(annotation))
    return converted


def parse_text(text: str, annotation: Any) -> Any:
    """Return the TOML value that unquoted text, as a variable holds it, stands for.

    Raises
    ------
    Mismatch
        The text is no TOML value, and the type is none that takes text as it is.
    """
    kinds = _alternatives(annotation)
    if type(None) in kinds and text == "":
        return None
    kind = next(each for each in kinds if each is not type(None))
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, str | Path)):
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [parse_text(each.strip(), get_args(kind)[0]) for each in text.split(",") if each.strip()]
    try:
        # One value only: a line break would let a second key in.
        return tomllib.loads(f"value = {text.strip()}", parse_float=Decimal)["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        raise Mismatch(expectation(annotation)) from None


def expectation(annotation: Any) -> str:
    """Return a type annotation in words."""
    kinds, args = _alternatives(annotation), get_args(annotation)
    origin = get_origin(annotation) or annotation
    if annotation not in kinds:
        return " or ".join(expectation(each) for each in kinds if each is not type(None))
    if origin is Literal or issubclass(origin, StrEnum):
        return "one of " + ", ".join(repr(str(each)) for each in args or annotation)
    if origin is tuple:
        return f"a list, each {expectation(args[0])}"
    if issubclass(origin, Mapping):
        return "a table" if args[1] is Any else f"a table, each value {expectation(args[1])}"
    return _WORDS[annotation]


_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    Decimal: "a finite amount",
    str: "a string",
    Path: "a path",
}


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _read_path(_: type, value: Any) -> Path:
    if not isinstance(value, str | Path) or value == "":
        raise ValueError("not a path")
    return Path(value).expanduser()


def _without_decimals(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_decimals(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_decimals(each) for each in value]
    return float(value) if isinstance(value, Decimal) else value


def _is_finite(value: Any) -> bool:
    if isinstance(value, tuple | dict):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float | Decimal) or math.isfinite(value)
