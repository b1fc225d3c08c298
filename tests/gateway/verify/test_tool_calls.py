"""Calls of tools compared as parsed arguments, and kept until a check is done."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import (
    PLAIN_TEXT,
    Audio,
    File,
    Image,
    Message,
    OutputFormat,
    SamplingParams,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.api.request import InferenceRequest, ReasoningPart, TextPart, ToolResultPart, Turn
from gateway.verify.grader_combination import GraderCombination
from gateway.verify.graders.tool_calls import compare
from gateway.verify.request_codec import pack_answer, pack_prompt, unpack_answer, unpack_request

plain = (
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9).map(lambda x: round(x, 2)) | st.text(max_size=5)
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
arguments = st.dictionaries(st.sampled_from(["city", "days", "unit"]), values)
calls = st.lists(
    st.builds(lambda name, given: call(name, given), st.sampled_from(["a", "b"]), arguments), min_size=1, max_size=4
)


def call(name: str, given: Any) -> ToolCall:
    return ToolCall("c", name, given if isinstance(given, str) else json.dumps(given))


def said(one: list[ToolCall], other: list[ToolCall]) -> tuple[float, float]:
    """Equal in normal form, and as written."""
    grade = compare(one, other)
    assert grade is not None
    return grade.score, grade.details["exact"]


@given(calls, st.randoms(use_true_random=False))
def test_order_and_spelling_do_not_count(made: list[ToolCall], rng: Any) -> None:
    other = [ToolCall(f"id{n}", each.name, _respelt(each.arguments, rng)) for n, each in enumerate(made)]
    rng.shuffle(other)
    assert said(made, other) == (1.0, 1.0)


def _respelt(text: str, rng: Any) -> str:
    """The same value with names in another order, spaces, and whole numbers as floats."""

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            names = list(value)
            rng.shuffle(names)
            return {name: change(value[name]) for name in names}
        if isinstance(value, list):
            return [change(each) for each in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    return json.dumps(change(json.loads(text)), indent=2)


@given(calls, calls)
def test_it_is_symmetric_and_exact_equality_implies_the_other(one: list[ToolCall], other: list[ToolCall]) -> None:
    assert compare(one, other) == compare(other, one)
    loose, exact = said(one, other)
    assert loose >= exact


@given(calls, st.data())
def test_one_call_less_or_changed_is_another_answer(made: list[ToolCall], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(made) - 1))
    rest = made[:place] + made[place + 1 :]
    changed = ToolCall("c", made[place].name, json.dumps(json.loads(made[place].arguments) | {"new": 1}))
    assert said(made, [*rest, changed]) == (0.0, 0.0)
    if rest:
        assert said(made, rest) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "loose", "exact"),
    [
        ({"n": 1}, {"n": 1.0}, 1, 1),
        ({"n": 1}, {"n": True}, 0, 0),
        ({"n": 1}, {"n": "1"}, 0, 0),
        ({"n": 2**53 + 1}, {"n": float(2**53)}, 0, 0),
        ({"c": "San Francisco, CA"}, {"c": "san francisco ca"}, 1, 0),
        ({"c": "new-york"}, {"c": "New York"}, 1, 0),
        ({"c": "1.5"}, {"c": "15"}, 0, 0),
        ({"c": "-5"}, {"c": "5"}, 0, 0),
        ({"c": "+"}, {"c": "-"}, 0, 0),
        ({"c": ""}, {"c": "-"}, 0, 0),
        ({"c": [1, 2]}, {"c": [2, 1]}, 0, 0),
        ({"c": None}, {}, 0, 0),
        ({"Key": 1}, {"key": 1}, 0, 0),
        ("{broken", "{broken", 1, 1),
        ("{broken", "{ broken", 0, 0),
    ],
)
def test_what_is_equal(one: Any, other: Any, loose: int, exact: int) -> None:
    assert said([call("f", one)], [call("f", other)]) == (loose, exact)


def test_names_and_kinds() -> None:
    assert said([call("f", {})], [call("g", {})]) == (0.0, 0.0)
    assert compare([], []) is None
    grade = compare([call("f", {})], [])
    assert grade is not None
    assert (grade.score, grade.details["same_kind"]) == (0.0, 0.0)


def test_what_the_comparison_is_worth() -> None:
    combination = GraderCombination.load("builtin", portable_only=True)

    def p_good(one: Any, other: Any) -> float:
        grade = compare([call("f", one)], [] if other is None else [call("f", other)])
        assert grade is not None
        found = combination.combine({"tool_calls": grade})
        assert found is not None
        assert found[1] == "calls"
        return round(found[0], 3)

    assert p_good({"c": "Kiel"}, {"c": "Kiel"}) == 0.998
    assert p_good({"c": "Kiel"}, {"c": "kiel"}) == 0.97
    assert p_good({"c": "Kiel"}, {"c": "Bonn"}) == 0.45
    assert p_good({"c": "Kiel"}, None) == 0.151


schema = st.dictionaries(st.text(max_size=4), values, max_size=3)


@given(
    st.lists(st.builds(Tool, st.sampled_from(["a", "b"]), st.text(), schema, st.booleans()), max_size=2).map(tuple),
    st.builds(ToolChoice, st.sampled_from(["auto", "none", "required"]), st.just(("a",)), st.booleans()),
    st.sampled_from([PLAIN_TEXT, OutputFormat("json_object"), OutputFormat("choice", ("x", "y"), True)]),
    st.text(),
    calls,
)
def test_a_request_with_tools_comes_back_whole(
    tools: tuple[Tool, ...], choice: ToolChoice, wanted: OutputFormat, text: str, made: list[ToolCall]
) -> None:
    media = (Image("data:,", "low"), Audio("AA==", "wav"), File("data:,", "a.pdf"))
    conversation = (
        Turn("user", (TextPart(text), *media)),
        Turn("assistant", (ReasoningPart(text, "s"), ReasoningPart("", "x", is_redacted=True), *made)),
        Turn("tool", tuple(ToolResultPart(each.call_id, (TextPart(text),)) for each in made)),
    )
    asked = InferenceRequest(
        model="auto",
        prompts=(conversation,),
        sampling=SamplingParams(),
        tools=tools,
        tool_choice=choice,
        output_format=wanted,
    )
    found = unpack_request("v", pack_prompt(asked), {})
    assert (found.tools, found.tool_choice, found.output_format) == (tools, choice, wanted)
    assert found.messages is not None
    first, second, *results = found.messages
    assert first == Message("user", text, parts=(text, *media))
    thoughts = (Thought(text, "s"), Thought("", "x", is_redacted=True))
    assert second == Message("assistant", "", tool_calls=tuple(made), reasoning=text, thoughts=thoughts)
    assert results == [Message("tool", text, tool_call_id=each.call_id) for each in made]


def test_an_image_that_was_packed_before_there_were_other_media_comes_back() -> None:
    packed = '{"messages": [["user", "", null, {"parts": ["", {"url": "data:,", "detail": "low"}]}]]}'
    assert unpack_request("v", packed, {}).messages == (Message("user", "", parts=("", Image("data:,", "low"))),)


@given(st.text() | st.text().map(lambda rest: f"\x1d{rest}"), st.just([]) | calls)
def test_an_answer_comes_back_whole(text: str, made: list[ToolCall]) -> None:
    packed = pack_answer(text, made)
    assert unpack_answer(packed) == (text, tuple(made))
    assert bool(made) <= (packed != text)
