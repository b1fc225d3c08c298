"""Reads recorded answers to the Berkeley Function Calling Leaderboard as requests with tools and graded calls.

The folder holds ``tests.parquet`` (question, functions, group, fold), ``outcomes.parquet`` (test, model, right) and
``answers.parquet`` (raw answers of some models). Functions become tools as models with native calls were given them:
their types are mapped to JSON Schema's, and a dot in a name is an underscore.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.protocol import Tool, ToolCall

BENCHMARK = "bfcl"

_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("dict", "HashMap", "object"), "object"),
    **dict.fromkeys(("tuple", "list", "Array", "ArrayList", "array"), "array"),
    **dict.fromkeys(("float", "double", "number"), "number"),
    **dict.fromkeys(("integer", "long"), "integer"),
    "boolean": "boolean",
}
"""Type of a parameter -> JSON Schema's; all others are text."""

_MAX_TEXT_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class ToolTest:
    """One test: what is asked, with which tools, and where it stands in the split."""

    test_id: str
    category: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Tool, ...]
    group: str
    fold: int


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a model gave: calls, or a text without any."""

    text: str
    calls: tuple[ToolCall, ...]
    is_right: bool


def read_tests(folder: Path) -> dict[str, ToolTest]:
    """Return the graded tests by id."""
    return {
        row["test_id"]: ToolTest(
            row["test_id"],
            row["category"],
            tuple(json.loads(row["messages"])),
            tuple(make_tool(each) for each in json.loads(row["functions"])),
            row["group_id"],
            row["fold"],
        )
        for row in _rows(folder / "tests.parquet")
        if row["graded"]
    }


def read_outcomes(folder: Path) -> dict[tuple[str, str], int]:
    """Return (test, model) -> 1 where the model's calls were right, else 0."""
    return {(row["test_id"], row["model"]): row["right"] for row in _rows(folder / "outcomes.parquet")}


def read_answers(folder: Path) -> dict[tuple[str, str], ToolAnswer]:
    """Return (test, model) -> its recorded answer."""
    found = {}
    for row in _rows(folder / "answers.parquet"):
        is_native = row["mode"] == "calls"
        calls = _native_calls(row["answer"]) if is_native else written_calls(row["answer"])
        text = "" if calls else row["answer"]
        found[row["test_id"], row["model"]] = ToolAnswer(text, calls, bool(row["right"]))
    return found


def make_tool(function: Mapping[str, Any]) -> Tool:
    """Return a function of the leaderboard as a tool."""
    return Tool(function["name"].replace(".", "_"), function["description"], as_schema(function["parameters"]))


def as_schema(parameter: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's description as JSON Schema."""
    kind = _TYPES.get(parameter.get("type", "string"), "string")
    found: dict[str, Any] = {"type": kind}
    found |= {name: parameter[name] for name in ("description", "enum") if name in parameter}
    if kind == "object" and "properties" in parameter:
        found["properties"] = {name: as_schema(each) for name, each in parameter["properties"].items()}
        found["required"] = list(parameter.get("required", ()))
    if kind == "array" and isinstance(parameter.get("items"), Mapping):
        found["items"] = as_schema(parameter["items"])
    return found


def _native_calls(answer: str) -> tuple[ToolCall, ...]:
    pairs = [next(iter(each.items())) for each in json.loads(answer)]
    return tuple(ToolCall(f"call_{place}", name, arguments) for place, (name, arguments) in enumerate(pairs))


def written_calls(text: str) -> tuple[ToolCall, ...]:
    """Return calls that a model wrote as Python, ``[name(key=value), …]``; none where it wrote something else."""
    source = text.strip()
    if len(source) > _MAX_TEXT_CHARS:
        return ()
    try:
        tree = ast.parse(source if source.startswith("[") else f"[{source}]", mode="eval").body
        assert isinstance(tree, ast.List)
        return tuple(_written_call(place, node) for place, node in enumerate(tree.elts))
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
        return ()


def _written_call(place: int, node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    if node.args:
        raise ValueError("arguments without names")
    arguments = {keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
    return ToolCall(f"call_{place}", ast.unparse(node.func).replace(".", "_"), json.dumps(arguments))


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _rows(path: Path) -> Sequence[dict[str, Any]]:
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return found


def write_folder(folder: Path, target: Path) -> None:
    """Write the graded tests as a folder that ``suffice evaluate`` reads, with tools and every model's outcome."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    tests = read_tests(folder)
    prompts = [
        {
            "prompt_id": test.test_id,
            "benchmark": BENCHMARK,
            "prompt": test.messages[-1]["content"],
            "messages": json.dumps(test.messages),
            "tools": json.dumps([chat_tool(tool) for tool in test.tools]),
            "group_id": test.group,
            "fold": test.fold,
        }
        for test in tests.values()
    ]
    scores = [
        {"prompt_id": test_id, "model": model, "score": float(right)}
        for (test_id, model), right in read_outcomes(folder).items()
        if test_id in tests
    ]
    target.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(prompts), target / "prompts.parquet")
    parquet.write_table(arrow.Table.from_pylist(scores), target / "scores.parquet")


def chat_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as a chat completion's body has it."""
    spec = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": spec}
