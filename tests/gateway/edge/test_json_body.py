"""What a body of JSON may hold: counted before anything is made of it (security review L4)."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.edge import json_body
from gateway.edge.json_body import parse_object
from gateway.errors import MalformedBody

BODY_BYTES = 3_900_000
LEAVES = st.none() | st.booleans() | st.integers(-5, 10**15) | st.text('[]{}",\\\\a\u00e9\n', max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{"\\\\', max_size=3), inner, max_size=4),
    max_leaves=30,
)


def containers_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + sum(containers_of(each) for each in (value.values() if isinstance(value, dict) else value))


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max([depth_of(each) for each in (value.values() if isinstance(value, dict) else value)], default=0)


@given(VALUES, st.booleans(), st.integers(1, 6))
def test_brackets_and_levels_are_those_of_the_value(value: Any, is_ascii: bool, max_depth: int) -> None:
    value = [value]
    written = json.dumps(value, ensure_ascii=is_ascii).encode()
    outside = json_body._outside_strings(written)
    assert json_body._num_brackets(outside) == containers_of(value)
    assert json_body._is_deeper(value, outside, max_depth) == (depth_of(value) > max_depth)
    assert json_body._is_deeper(value, None, max_depth) == (depth_of(value) > max_depth)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("depth", [31, 32, 33, 900])
def test_depth_is_bounded_in_short_and_long_bodies(depth: int, is_long: bool) -> None:
    body = b'{"pad":"%b","x":%b1%b}' % (b"[" * 60_000 * is_long, b"[" * (depth - 1), b"]" * (depth - 1))
    if depth <= 32:
        assert parse_object(body, 32)["x"]
    else:
        with pytest.raises(MalformedBody, match="nested deeper than 32 levels"):
            parse_object(body, 32)


@pytest.mark.parametrize(
    "unit",
    [
        b"[]",
        b"{}",
        b"[[]]",
        b'{"a":{}}',
        b'[""]',
        b'"a"',
        b'""',
        b'"\\\\"',
        b'"\\""',
        b"1",
        b'{"a":1}',
        b"[1,2]",
    ],
)
def test_many_small_values_are_refused_before_anything_is_made_of_them(unit: bytes) -> None:
    many = b",".join([unit] * (BODY_BYTES // (len(unit) + 1)))
    # The end is no JSON, which reading it would find.
    with pytest.raises(MalformedBody, match="holds more than"):
        parse_object(b'{"metadata":[' + many + b"], no JSON", 32)


@pytest.mark.parametrize("char", ["[", "{", ",", '"', "\\", "a", "\u00e9", '{"a": [1, 2]}\n'])
def test_a_long_text_is_no_many_values(char: str) -> None:
    content = char * (BODY_BYTES // (len(orjson.dumps(char)) - 2))
    read = parse_object(orjson.dumps({"messages": [{"role": "user", "content": content}]}), 32)
    assert read["messages"][0]["content"] == content


def test_the_largest_honest_requests_are_read() -> None:
    parts = [{"type": "text", "text": "some [words] {here}"}] * 3
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "assistant", "content": parts, "tool_calls": calls}] * 2048
    member = {"type": "string", "description": "of a person", "enum": ["a", "b"]}
    properties = {str(number): member for number in range(50)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}] * 128
    inputs = [[100_000 + each for each in range(400)]] * 1400
    for body in ({"messages": messages, "tools": tools}, {"input": inputs}):
        written = orjson.dumps(body)
        assert len(written) > 500_000
        assert parse_object(written, 32) == body


def test_what_is_taken_holds_the_loop_no_longer_than_some_megabytes_of_text_do() -> None:
    """Not a time but a ratio with a wide margin: the refused one used to take thirty times as long as the text."""
    text = orjson.dumps({"x": "a [b] " * (BODY_BYTES // 6)})
    lists = b'{"x":[' + b",".join([b"[]"] * (BODY_BYTES // 3)) + b"]}"

    def spent_s(body: bytes) -> float:
        begun_s = time.process_time()
        with suppress(MalformedBody):
            parse_object(body, 32)
        return time.process_time() - begun_s

    assert min(spent_s(lists) for _ in range(5)) < 6 * min(spent_s(text) for _ in range(5))
