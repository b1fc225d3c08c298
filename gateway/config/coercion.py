"""Turns what a configuration file or a variable says into the type a setting is declared with."""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin


class Mismatch(Exception):
    """The value has not the declared type; ``expected`` says in words what it should be."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def coerce(value: Any, annotation: Any) -> Any:
    """Check a TOML value against a type annotation and convert what converts without loss.

    Raises
    ------
    Mismatch
        The value is of another type, is not a choice, or is not finite.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return plain(value)
    if origin in (Union, types.UnionType):
        return _union(value, args)
    if origin is Literal:
        if value not in args or isinstance(value, bool) is not isinstance(args[0], bool):
            raise Mismatch(expectation(annotation))
        return value
    if origin is tuple:
        return _tuple(value, args[0], expectation(annotation))
    if origin in (Mapping, dict, types.MappingProxyType) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _mapping(value, args, annotation)
    return _scalar(value, annotation)


def from_text(text: str, annotation: Any) -> Any:
    """Read unquoted text, as a variable holds it, as the TOML value the annotation asks for.

    Raises
    ------
    Mismatch
        The text cannot be read as that type.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        if type(None) in args and text == "":
            return None
        return from_text(text, next(each for each in args if each is not type(None)))
    if (
        annotation in (str, Path)
        or origin is Literal
        or (isinstance(annotation, type) and issubclass(annotation, StrEnum))
    ):
        return text
    if origin is tuple and not text.lstrip().startswith("["):
        return [from_text(each.strip(), args[0]) for each in text.split(",") if each.strip()]
    try:
        # One value only: a line break would let a second key in.
        return tomllib.loads(f"value = {text.strip()}", parse_float=Decimal)["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        raise Mismatch(expectation(annotation)) from None


def expectation(annotation: Any) -> str:
    """A type annotation in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(expectation(each) for each in args if each is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return f"a list, each {expectation(args[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table" if args[1] is Any else f"a table, each value {expectation(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return "one of " + ", ".join(repr(each.value) for each in annotation)
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def plain(value: Any) -> Any:
    """A free-form value with exact decimals turned into the floats JSON knows."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    Decimal: "a finite amount",
    str: "a string",
    Path: "a path",
}


def _union(value: Any, args: tuple[Any, ...]) -> Any:
    if value is None and type(None) in args:
        return None
    for each in args:
        if each is not type(None):
            try:
                return coerce(value, each)
            except Mismatch:
                continue
    raise Mismatch(expectation(Union[args]))  # noqa: UP007  the members are only known at run time


def _tuple(value: Any, annotation: Any, wanted: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Mismatch(wanted)
    try:
        return tuple(coerce(each, annotation) for each in value)
    except Mismatch:
        raise Mismatch(wanted) from None


def _mapping(value: Any, args: tuple[Any, ...], annotation: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise Mismatch(expectation(annotation))
    try:
        return {coerce(_key(key, args[0]), args[0]): coerce(each, args[1]) for key, each in value.items()}
    except Mismatch:
        raise Mismatch(expectation(annotation)) from None


def _key(key: Any, annotation: Any) -> Any:
    # TOML keys are strings; a table keyed by numbers is written with the numbers as keys.
    return from_text(key, annotation) if isinstance(key, str) else key


def _scalar(value: Any, annotation: Any) -> Any:
    wanted = expectation(annotation)
    if annotation is bool or annotation is int:
        if type(value) is not annotation:
            raise Mismatch(wanted)
        return value
    if annotation is float or annotation is Decimal:
        return _number(value, annotation, wanted)
    if annotation is str:
        if not isinstance(value, str):
            raise Mismatch(wanted)
        return value
    if annotation is Path:
        if not isinstance(value, str | Path) or str(value) == "":
            raise Mismatch(wanted)
        return Path(value).expanduser()
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        try:
            return annotation(value)
        except ValueError:
            raise Mismatch(wanted) from None
    raise TypeError(f"settings of type {annotation!r} cannot be read")


def _number(value: Any, annotation: type[float] | type[Decimal], wanted: str) -> float | Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        raise Mismatch(wanted)
    if isinstance(value, str) and annotation is float:
        raise Mismatch(wanted)
    try:
        number = annotation(str(value))
    except (ValueError, ArithmeticError):
        raise Mismatch(wanted) from None
    if not math.isfinite(number):
        raise Mismatch(wanted)
    return number
