"""Values that do not fit a declared type: each kind of error, its path, its words; and the schema of the same type."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from gateway.api.declaration import ClosedShape, Dollars, Words, checked, explain, fits, limited, schema_of
from gateway.errors import InvalidRequest

Count = Annotated[int, Meta(ge=1, le=8)]
Word = Annotated[str, Meta(min_length=1, max_length=4)]
Key = Annotated[str, Meta(pattern=r"^[0-9]+(?!\n)$")]


def _own_error(value: Any, param: str) -> InvalidRequest | None:
    return InvalidRequest(f"'{param}' may not be {value}.", param=param) if value == 13 else None


class Text(Struct, tag="text", tag_field="type"):
    text: str


class Picture(Struct, tag="picture", tag_field="type"):
    url: Word


class Options(ClosedShape, frozen=True):
    member = "option"

    depth: Count | None = None
    cost: Dollars | None = None


class Thing(Struct, kw_only=True):
    checked_first = ("name", "colour")

    name: str
    count: Count | None = None
    share: Annotated[float, Meta(ge=0, le=1)] | None = None
    is_on: bool | None = None
    word: Word | None = None
    colour: Literal["red", "blue"] | None = None
    words: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=2), Words(items="words")] | None = None
    stop: Annotated[Word | list[Word], Words(kind="a word or an array of words")] | None = None
    either: int | list[str] | None = None
    table: Annotated[dict[Key, Count], Meta(max_length=2), Words(value="digits as keys")] | None = None
    parts: list[Text | Picture] | None = None
    options: Options | None = None
    unlucky: Annotated[Annotated[int, Meta(ge=0, le=12)], Words(kind="a lucky number", error=_own_error)] | None = None
    nothing: None = None
    anything: Any = None


# (member, value, the param that is blamed, the message)
WRONG: list[tuple[str, Any, str, str]] = [
    ("name", None, "name", "Invalid type for 'name': expected a string, got null."),
    ("name", 5, "name", "Invalid type for 'name': expected a string, got an integer."),
    ("count", 9, "count", "Invalid value for 'count': expected an integer from 1 to 8, got 9."),
    ("count", 3.0, "count", "Invalid type for 'count': expected an integer, got a number."),
    ("count", True, "count", "Invalid type for 'count': expected an integer, got a boolean."),
    ("count", 1e30, "count", "Invalid value for 'count': expected an integer from 1 to 8, got 1e+30."),
    ("count", 2**64 - 1, "count", f"Invalid value for 'count': expected an integer from 1 to 8, got {2**64 - 1}."),
    ("share", 1.5, "share", "Invalid value for 'share': expected a number from 0 to 1, got 1.5."),
    ("share", 2, "share", "Invalid value for 'share': expected a number from 0 to 1, got 2."),
    ("share", "x", "share", "Invalid type for 'share': expected a number, got a string."),
    ("is_on", 1, "is_on", "Invalid type for 'is_on': expected a boolean, got an integer."),
    ("word", "", "word", "Invalid value for 'word': expected 1 to 4 characters, got '0 characters'."),
    ("word", "fivex", "word", "Invalid value for 'word': expected 1 to 4 characters, got '5 characters'."),
    ("colour", "green", "colour", "Invalid value for 'colour': expected one of 'red', 'blue', got 'green'."),
    ("colour", [], "colour", "Invalid type for 'colour': expected a string, got an array."),
    ("words", "x", "words", "Invalid type for 'words': expected an array, got a string."),
    ("words", [], "words", "Invalid value for 'words': expected at least 1 words, got '0 words'."),
    ("words", ["a"] * 3, "words", "Invalid value for 'words': expected at most 2 words, got '3 words'."),
    ("words", ["a", {}], "words[1]", "Invalid type for 'words[1]': expected a string, got an object."),
    ("stop", 5, "stop", "Invalid type for 'stop': expected a word or an array of words, got an integer."),
    ("stop", "", "stop", "Invalid value for 'stop': expected 1 to 4 characters, got '0 characters'."),
    ("stop", ["a", ""], "stop[1]", "Invalid value for 'stop[1]': expected 1 to 4 characters, got '0 characters'."),
    ("either", "x", "either", "Invalid type for 'either': expected an integer or an array, got a string."),
    ("table", [], "table", "Invalid type for 'table': expected an object, got an array."),
    ("table", {"x": 1}, "table", "Invalid value for 'table': expected digits as keys, got 'x'."),
    ("table", {"1\n": 1}, "table", "Invalid value for 'table': expected digits as keys, got '1\\n'."),
    ("table", {"17": 9}, "table.17", "Invalid value for 'table.17': expected an integer from 1 to 8, got 9."),
    (
        "table",
        {"1": 1, "2": 2, "3": 3},
        "table",
        "Invalid value for 'table': expected at most 2 entries, got '3 entries'.",
    ),
    ("parts", [[]], "parts[0]", "Invalid type for 'parts[0]': expected an object, got an array."),
    ("parts", [{}], "parts[0].type", "Invalid type for 'parts[0].type': expected a string, got null."),
    (
        "parts",
        [{"type": "x"}],
        "parts[0].type",
        "Invalid value for 'parts[0].type': expected one of 'text', 'picture', got 'x'.",
    ),
    ("parts", [{"type": "text"}], "parts[0].text", "Invalid type for 'parts[0].text': expected a string, got null."),
    (
        "parts",
        [{"type": "text", "text": ""}, {"type": "picture", "url": ""}],
        "parts[1].url",
        "Invalid value for 'parts[1].url': expected 1 to 4 characters, got '0 characters'.",
    ),
    ("options", 1, "options", "Invalid type for 'options': expected an object, got an integer."),
    ("options", {"dept": 1}, "options.dept", "'options' has no option 'dept'; it has depth, cost."),
    (
        "options",
        {"depth": 0},
        "options.depth",
        "Invalid value for 'options.depth': expected an integer from 1 to 8, got 0.",
    ),
    (
        "options",
        {"cost": True},
        "options.cost",
        "Invalid type for 'options.cost': expected an amount of dollars, got a boolean.",
    ),
    *[
        (
            "options",
            {"cost": wrong},
            "options.cost",
            f"Invalid value for 'options.cost': expected {Dollars.words.value}, got {wrong!r}.",
        )
        for wrong in ("x", -1, "1e-10", "NaN", 1e30)
    ],
    ("unlucky", 13, "unlucky", "'unlucky' may not be 13."),
    ("unlucky", 14, "unlucky", "Invalid value for 'unlucky': expected an integer from 0 to 12, got 14."),
    ("unlucky", "x", "unlucky", "Invalid type for 'unlucky': expected a lucky number, got a string."),
    ("nothing", 0, "nothing", "Invalid type for 'nothing': expected null, got an integer."),
]


@pytest.mark.parametrize(("member", "value", "param", "message"), WRONG, ids=lambda each: str(each)[:30])
def test_what_does_not_fit_is_named_and_worded(member: str, value: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        checked({"name": "x"} | {member: value}, Thing, "")
    assert (str(raised.value), raised.value.param) == (message, param)
    assert (raised.value.code == "invalid_type") == message.startswith("Invalid type")
    with pytest.raises(InvalidRequest) as raised:
        checked([{"name": "x"}, {"name": "x"} | {member: value}], list[Thing], "things")
    assert raised.value.param == f"things[1].{param}"


def test_what_is_checked_first_is_blamed_first() -> None:
    with pytest.raises(InvalidRequest) as raised:
        checked({"count": 0, "colour": 1}, Thing, "")
    assert raised.value.param == "name"
    with pytest.raises(InvalidRequest) as raised:
        checked({"name": "x", "count": 0, "colour": 1}, Thing, "")
    assert raised.value.param == "colour"


def test_null_and_unknown_members_are_tolerated() -> None:
    everything = dict.fromkeys(Thing.__struct_fields__) | {"name": "x", "unknown": object()}
    assert checked(everything, Thing, "") == Thing(name="x")


def test_limits_known_at_start_narrow_a_shape() -> None:
    narrow = limited(Thing, count=Annotated[int, Meta(ge=1, le=2)])
    assert checked({"name": "x", "count": 2}, narrow, "").count == 2
    assert checked({"name": "x", "count": None}, narrow, "").count is None
    with pytest.raises(InvalidRequest, match="from 1 to 2, got 3"):
        checked({"name": "x", "count": 3}, narrow, "")
    assert narrow.__struct_fields__ == Thing.__struct_fields__
    assert "'maximum': 2" in str(schema_of(narrow))


@pytest.mark.parametrize(
    ("sent", "amount"), [("0.10", "0.10"), (5, "5"), (0.1, "0.1"), (1e-9, "1E-9"), ("1e3", "1E+3")]
)
def test_dollars_are_read_as_written(sent: Any, amount: str) -> None:
    read = checked(sent, Dollars, "cost")
    assert (read, str(read)) == (Decimal(amount), amount)


_member_names = st.sampled_from(["type", "text", "url", "depth", "cost", "7"]) | st.text(max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "red", "text", "picture", "12", "word", "0.5"]) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(_member_names, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(Thing.__struct_fields__), json_values, max_size=4))
def test_any_value_is_read_or_blamed_and_the_schema_agrees(members: dict[str, Any]) -> None:
    # Through the parser, as bodies come: integers beyond 64 bits are numbers to it.
    value = {key: each for key, each in members.items() if not _is_beyond_the_parser(each)}
    fits = jsonschema.Draft202012Validator(schema_of(Thing)).is_valid(value)
    error = _error_of(value)
    if error is None:
        assert fits or "cost" in str(value)
        return
    assert error.param is not None
    assert error.param.partition(".")[0].partition("[")[0] in Thing.__struct_fields__
    assert "another value" not in str(error)
    # JSON Schema takes 3.0 for an integer, and the words of an amount of dollars say more than its schema.
    assert not fits or "got a number" in str(error) or "dollars" in str(error)


def _error_of(value: Any) -> InvalidRequest | None:
    try:
        checked(value, Thing, "")
    except InvalidRequest as error:
        return error
    return None


def _is_beyond_the_parser(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


@given(st.lists(st.integers(-2, 10) | st.text(max_size=2), max_size=40))
def test_the_first_item_that_does_not_fit_is_blamed(items: list[Any]) -> None:
    misfits = [place for place, each in enumerate(items) if not fits(each, Count)]
    error = explain(items, list[Count], "n")
    assert error.param == (f"n[{misfits[0]}]" if misfits else "n")
