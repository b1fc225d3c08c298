"""Recorded tool calls are read as requests and answers; the same calls had the same outcome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from backends.protocol import ToolCall
from classifier.graded_table import read_graded
from gateway.bench.bfcl import as_schema, read_answers, read_tests, write_folder, written_calls
from gateway.bench.tool_calls import PAIRS, graded_pairs, judge_checks
from tests.shared_data import shared_data


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("\n\n[a.b(c=1, d='x')]", [("a_b", {"c": 1, "d": "x"})]),
        ("a(c=[1, {'d': None}])", [("a", {"c": [1, {"d": None}]})]),
        ("[a(), b(c=-1.5)]", [("a", {}), ("b", {"c": -1.5})]),
        ("[a(c=map)]", [("a", {"c": "map"})]),
        ("[]", []),
        ("[a({'c': 1})]", []),
        ("[a(1)]", []),
        ("I would call a(c=1).", []),
        ("[a(c=1)", []),
        ("[1, 2]", []),
        ("[" * 30_000, []),
        ("[a(c=" + "-" * 19_000 + "1)]", []),
    ],
)
def test_calls_written_as_text(text: str, calls: list[tuple[str, Any]]) -> None:
    assert [(each.name, json.loads(each.arguments)) for each in written_calls(text)] == calls


def test_types_of_three_languages_become_schemas() -> None:
    given = {
        "type": "dict",
        "properties": {
            "a": {"type": "float", "description": "A."},
            "b": {"type": "ArrayList", "items": {"type": "long"}},
            "c": {"type": "any", "enum": ["x"]},
        },
        "required": ["a"],
    }
    assert as_schema(given) == {
        "type": "object",
        "properties": {
            "a": {"type": "number", "description": "A."},
            "b": {"type": "array", "items": {"type": "integer"}},
            "c": {"type": "string", "enum": ["x"]},
        },
        "required": ["a"],
    }


def test_recorded_calls_are_what_the_checks_say(tmp_path: Path) -> None:
    folder = shared_data("bfcl")
    tests, answers = read_tests(folder), read_answers(folder)
    for test in tests.values():
        for tool in test.tools:
            jsonschema.Draft202012Validator.check_schema(tool.parameters)
    num_same = 0
    for pair in PAIRS:
        found = judge_checks(graded_pairs(tests, answers, pair), seed=0)
        kinds = found["kinds"]
        num_same += round(kinds["same calls"]["share"] * found["num_pairs"])
        assert kinds["same calls"]["share_good"] == 1.0
        assert kinds["call and text"]["share_good"] < 0.5
    assert num_same > 2000
    write_folder(folder, tmp_path / "graded")
    table = read_graded(tmp_path / "graded", PAIRS[1])
    assert len(table) == len(tests) == 962
    assert all(each.tools for each in table.requests)
    assert [tuple(table.scores.mean(axis=0).round(3).tolist())] == [(0.833, 0.865)]


def test_an_answer_is_text_or_calls() -> None:
    answers = read_answers(shared_data("bfcl"))
    assert all(bool(each.text) != bool(each.calls) for each in answers.values() if each.text or each.calls)
    assert all(isinstance(call, ToolCall) for each in answers.values() for call in each.calls)
