"""What is wrong with an answer is known for certain, or not said: `jsonschema` is the oracle, and bombs are bounded."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.protocol import PLAIN_TEXT, OutputFormat, SamplingParams, Tool, ToolCall, ToolChoice
from gateway.api.request import InferenceRequest
from gateway.outcomes.answer_validator import AnswerRules, Fault
from gateway.outcomes.schema_validator import MAX_SCHEMA_SIZE, satisfies
from tests.shared_data import shared_data

PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "via": {"$ref": "#/$defs/stop"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"stop": {"type": "object", "properties": {"next": {"$ref": "#/$defs/stop"}}, "required": ["id"]}},
}
FORECAST, NOW = Tool("forecast", parameters=PLAIN), Tool("now")

cities = st.text("abcxyz ", max_size=8).map(lambda tail: f"K{tail}")
stops = st.recursive(
    st.builds(lambda i: {"id": i}, st.integers()),
    lambda inner: st.builds(lambda i, n: {"id": i, "next": n}, st.integers(), inner),
    max_leaves=5,
)
valid = st.fixed_dictionaries(
    {"city": cities, "days": st.integers(1, 14)},
    optional={
        "unit": st.sampled_from(["C", "F"]),
        "at": st.lists(st.floats(-180, 180), min_size=2, max_size=2),
        "via": stops,
    },
)
MUTATIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a field is missing": lambda a: {name: value for name, value in a.items() if name != "city"},
    "a number is text": lambda a: a | {"days": str(a["days"])},
    "a number is out of range": lambda a: a | {"days": a["days"] + 14},
    "a field is made up": lambda a: a | {"town": "Kiel"},
    "a value is made up": lambda a: a | {"unit": "K"},
    "a pattern is broken": lambda a: a | {"city": "k"},
    "too few items": lambda a: a | {"at": [1.0]},
    "what a reference says is broken": lambda a: a | {"via": {"id": 1, "next": {}}},
    "an object is a list": lambda a: [a],
    "an object is null": lambda a: None,
}


def rules(
    tools: tuple[Tool, ...] = (FORECAST, NOW), choice: ToolChoice | None = None, wanted: OutputFormat = PLAIN_TEXT
) -> AnswerRules:
    return AnswerRules(tools, choice or ToolChoice(), wanted)


def call(arguments: Any, name: str = "forecast") -> ToolCall:
    return ToolCall("c", name, arguments if isinstance(arguments, str) else json.dumps(arguments))


@given(valid)
def test_a_valid_call_has_no_fault(arguments: dict[str, Any]) -> None:
    assert rules().fault("", [call(arguments), call("{}", "now")]) is None


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
@given(arguments=valid)
@settings(max_examples=30)
def test_a_mutated_call_breaks_its_schema(mutate: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> None:
    broken = mutate(arguments)
    assert not jsonschema.Draft202012Validator(PLAIN).is_valid(broken)
    assert rules().fault("", [call("{}", "now"), call(broken)]) is Fault.BREAKS_SCHEMA


@given(valid, st.data())
def test_a_text_cut_short_is_no_json(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(arguments)
    cut = data.draw(st.integers(0, len(text) - 1))
    assert rules().fault("", [call(text[:cut])]) is Fault.NOT_JSON


small = st.sampled_from(["a", "b", "c"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "bb"]) | st.sampled_from([0.5, 1.0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(small, inner, max_size=3),
    max_leaves=6,
)
schemas: st.SearchStrategy[Any] = st.recursive(
    st.booleans()
    | st.fixed_dictionaries({"type": st.sampled_from(["object", "array", "string", "integer", "number", "null"])})
    | st.builds(lambda v: {"const": v}, values)
    | st.builds(lambda n: {"minimum": n}, st.integers(-3, 3))
    # Not in place: the oracle would go round in circles.
    | st.just({"properties": {"a": {"$ref": "#"}}})
    | st.just({"items": {"$ref": "#/$defs/a"}}),
    lambda inner: (
        st.builds(lambda p, r: {"properties": p, "required": r}, st.dictionaries(small, inner), st.lists(small))
        | st.builds(lambda a: {"additionalProperties": a}, inner)
        | st.builds(lambda i: {"items": i, "uniqueItems": True}, inner)
        | st.builds(lambda k, s: {k: s}, st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(inner, min_size=1))
        | st.builds(lambda s: {"not": s}, inner)
        | st.builds(lambda i, t: {"if": i, "then": t}, inner, inner)
    ),
    max_leaves=6,
)


@given(schemas, st.none() | schemas, values)
@settings(max_examples=300)
def test_verdicts_are_those_of_another_validator(schema: Any, definition: Any, value: Any) -> None:
    root = (schema if isinstance(schema, dict) else {"allOf": [schema]}) | (
        {} if definition is None else {"$defs": {"a": definition}}
    )
    said = satisfies(root, value)
    try:
        truth = jsonschema.Draft202012Validator(root).is_valid(value)
    except Exception:  # references that lead nowhere
        return
    assert said in (truth, None)
    if "$ref" not in json.dumps(root) and not _repeats(root):
        assert said is truth


def _repeats(schema: Any) -> bool:
    """Whether a list of required names has one twice, which no draft permits."""
    if isinstance(schema, dict):
        required = schema.get("required", [])
        return len(set(map(str, required))) < len(required) or any(map(_repeats, schema.values()))
    return isinstance(schema, list) and any(map(_repeats, schema))


@pytest.mark.parametrize(
    ("calls", "choice", "fault"),
    [
        ([], ToolChoice(), None),
        ([], ToolChoice("required"), Fault.MISSING_CALL),
        ([call("{}", "now")], ToolChoice("required", ("forecast",)), Fault.FORBIDDEN_CALL),
        ([call("{}", "now")], ToolChoice("auto", ("now",)), None),
        ([call("{}", "now")], ToolChoice("none"), Fault.FORBIDDEN_CALL),
        ([call("{}", "now"), call("{}", "now")], ToolChoice(parallel=False), Fault.FORBIDDEN_CALL),
        ([call("{}", "then")], ToolChoice(), Fault.UNKNOWN_TOOL),
        ([call("[]", "now")], ToolChoice(), Fault.BREAKS_SCHEMA),
        ([call("NaN", "now")], ToolChoice(), Fault.NOT_JSON),
        ([call('"\\ud800"', "now")], ToolChoice(), Fault.NOT_JSON),
        ([call("[" * 5000, "now")], ToolChoice(), Fault.NOT_JSON),
    ],
)
def test_what_may_and_must_be_called(calls: list[ToolCall], choice: ToolChoice, fault: Fault | None) -> None:
    assert rules(choice=choice).fault("said", calls) is fault


@pytest.mark.parametrize(
    ("wanted", "text", "is_broken"),
    [
        (OutputFormat("json_object"), '{"a": 1}', False),
        (OutputFormat("json_object"), "[1]", True),
        (OutputFormat("json_object"), "```json\n{}\n```", True),
        (OutputFormat("json_schema", PLAIN), '{"city": "Kiel", "days": 2}', False),
        (OutputFormat("json_schema", PLAIN), '{"city": "Kiel"}', True),
        (OutputFormat("choice", ("yes", "no")), "no", False),
        (OutputFormat("choice", ("yes", "no")), "No.", True),
        (OutputFormat("regex", "a+"), "b", False),
        (OutputFormat("grammar", "root ::= 'a'"), "b", False),
    ],
)
def test_the_form_of_a_text(wanted: OutputFormat, text: str, is_broken: bool) -> None:
    assert rules((), wanted=wanted).fault(text, []) is (Fault.BREAKS_FORMAT if is_broken else None)


def test_a_request_that_takes_any_text_has_no_rules() -> None:
    request = InferenceRequest(model="auto", prompts=("hi",), sampling=SamplingParams())
    assert AnswerRules.of(request) is None


def _doubling(num: int) -> dict[str, Any]:
    """References of which each names the next one twice: written out, two to the power of their number."""
    defs: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(num)
    }
    return {"$defs": defs | {f"d{num}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def _deep(num: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(num):
        schema = {"properties": {"a": schema}}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "references that double": _doubling(64),
    "ten thousand keywords": {"properties": {f"p{n}": {"type": "string"} for n in range(10_000)}},
    "a long list": {"enum": list(range(100_000))},
    "deep": _deep(400),
    "many patterns": {"patternProperties": {f"^(a{{0,50}}){{0,{n}}}$": {} for n in range(1000)}},
    "a pattern too large": {"propertyNames": {"pattern": "^((a{0,100}){0,100}){0,100}$"}},
    "a pattern that looks back": {"propertyNames": {"pattern": r"(a*)*\1b"}},
    "the network": {"$ref": "http://localhost:9/schema.json"},
    "a file": {"$ref": "file:///etc/hostname"},
    "an id": {"$id": "http://localhost:9/a", "$ref": "other"},
    "nowhere": {"$ref": "#/$defs/none"},
    "not a schema": {"type": "dict"},
}


@pytest.mark.parametrize("schema", BOMBS.values(), ids=BOMBS.keys())
def test_a_schema_that_is_too_much_is_not_judged(schema: dict[str, Any]) -> None:
    begun_s = time.process_time()
    assert satisfies(schema, {"a": "b"}) is None
    # Of what doubles the whole would take years: any bound tells.
    assert time.process_time() - begun_s < 5.0


def test_hostile_patterns_match_in_linear_time() -> None:
    assert satisfies({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 100_000 + "b"}) is False
    assert satisfies({"$ref": "#"}, {}) is True
    recursive = {"allOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"$ref": "#"}}}]}
    value: dict[str, Any] = {}
    for _ in range(100):
        value = {"a": value}
    assert satisfies(recursive, value) is True


def test_a_large_value_under_a_large_schema_is_not_judged() -> None:
    schema = {"items": {"anyOf": [{"const": n} for n in range(MAX_SCHEMA_SIZE // 4)]}}
    assert satisfies(schema, [0]) is True
    assert satisfies(schema, [0] * 100_000) is None


def test_many_calls_share_the_work() -> None:
    tool = Tool("t", parameters={"properties": {f"p{n}": {"type": "string"} for n in range(800)}})
    bad = ToolCall("c", "t", '{"p0": 1}')
    assert rules((tool,)).fault("", [bad]) is Fault.BREAKS_SCHEMA
    assert rules((tool,)).fault("", [bad] * 1000) is None


def test_real_schemas_are_judged_and_no_sound_value_is_refused() -> None:
    """A verdict is a reason to pay for another answer: it must never be wrong that way."""
    import pyarrow.parquet as parquet

    verdicts: Counter[tuple[bool, bool | None]] = Counter()
    for row in parquet.read_table(shared_data("maskbench") / "maskbench.parquet").to_pylist():
        schema = json.loads(row["schema"])
        for each in json.loads(row["tests"]):
            verdicts[each["valid"], satisfies(schema, each["instance"])] += 1
    assert verdicts[True, False] == 0
    assert verdicts[True, True] > 1_500
    # What is let pass breaks a format, which says nothing for certain.
    assert verdicts[False, False] > 2_440
