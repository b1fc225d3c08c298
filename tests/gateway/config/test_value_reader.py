"""One written value: what is converted, what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from gateway.config.value_reader import Mismatch, convert, expectation, parse_text


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("value", "annotation", "converted"),
    [
        (3, float, 3.0),
        (Decimal("0.10"), float, 0.1),
        (Decimal("0.10"), Decimal, Decimal("0.10")),
        ("0.10", Decimal, Decimal("0.10")),
        (0.1, Decimal, Decimal("0.1")),
        (None, int | None, None),
        ("red", Colour, Colour.RED),
        ("a", Literal["a", "b"], "a"),
        (["x", "y"], tuple[str, ...], ("x", "y")),
        ({"1": Decimal("0.5"), 2: 1}, Mapping[int, float], {1: 0.5, 2: 1.0}),
        ({"a": {"b": [Decimal("1.5")]}}, Mapping[str, Any], {"a": {"b": [1.5]}}),
        ("~", Path, Path.home()),
    ],
)
def test_what_loses_nothing_is_converted(value: object, annotation: Any, converted: object) -> None:
    found = convert(value, annotation)
    assert found == converted
    assert type(found) is type(converted)
    assert str(found) == str(converted)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (True, int, "a whole number"),
        (1.0, int, "a whole number"),
        (Decimal("1.0"), int, "a whole number"),
        (1, bool, "true or false"),
        (True, float, "a finite number"),
        ("1", float, "a finite number"),
        (float("inf"), float, "a finite number"),
        (10**400, float, "a finite number"),
        (Decimal("1e400"), float, "a finite number"),
        (Decimal("nan"), float | None, "a finite number"),
        ("Infinity", Decimal, "a finite amount"),
        ("one", Decimal, "a finite amount"),
        (1, str, "a string"),
        (None, str, "a string"),
        ("", Path, "a path"),
        (3, Path, "a path"),
        ("green", Colour, "one of 'red', 'blue'"),
        (True, Literal["a", "b"], "one of 'a', 'b'"),
        ("xy", tuple[str, ...], "a list, each a string"),
        ([1.0, float("nan")], tuple[float, ...], "a list, each a finite number"),
        ({"x": 0.5}, Mapping[int, float], "a table, each value a finite number"),
        ({"1": float("nan")}, Mapping[int, float], "a table, each value a finite number"),
        (["x"], Mapping[str, Any], "a table"),
    ],
)
def test_the_rest_is_refused_in_words(value: object, annotation: Any, expected: str) -> None:
    with pytest.raises(Mismatch) as caught:
        convert(value, annotation)
    assert caught.value.expected == expected == expectation(annotation)


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("8000", int, 8000),
        (" 1_000 ", int, 1000),
        ("0.10", Decimal, Decimal("0.10")),
        ("true", bool, True),
        ("true", str, "true"),
        ("", str, ""),
        ("", int | None, None),
        ("x", str | None, "x"),
        ("red", Colour, "red"),
        ("a", Literal["a", "b"], "a"),
        ("a, b,", tuple[str, ...], ["a", "b"]),
        ('["a,b"]', tuple[str, ...], ["a,b"]),
        ("0.5,1", tuple[float, ...], [Decimal("0.5"), 1]),
        ("{ 1 = 0.5 }", Mapping[int, float], {"1": Decimal("0.5")}),
    ],
)
def test_text_of_a_variable_is_read_as_its_type_asks(text: str, annotation: Any, value: object) -> None:
    assert parse_text(text, annotation) == value


@pytest.mark.parametrize(
    ("text", "annotation"),
    [
        ("many", int),
        ("yes", bool),
        ("", int),
        ("1,x", tuple[int, ...]),
        ("[1", tuple[int, ...]),
        ("{a", Mapping[str, Any]),
    ],
)
def test_text_that_is_no_such_value_is_refused(text: str, annotation: Any) -> None:
    with pytest.raises(Mismatch) as caught:
        parse_text(text, annotation)
    assert caught.value.expected in expectation(annotation)


def test_a_line_break_lets_no_second_key_in() -> None:
    with pytest.raises(Mismatch):
        convert(parse_text("1\nhost = 2", int), int)
