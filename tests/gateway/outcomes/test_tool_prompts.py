"""Prompts with tools become a router: read as the server reads them, asked with their tools, graded by calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.protocol import Backend, GenerateRequest, ToolCall
from backends.testing import EchoBackend, Script
from classifier.router import ArtifactRouter
from classifier.tool_features import chat_request
from gateway.config.settings import Settings
from gateway.outcomes.answer_collection import CollectOptions
from gateway.outcomes.bootstrap import FitRequest, collect_outcomes, fit_outcomes
from gateway.outcomes.errors import PromptFileError
from gateway.outcomes.prompt_file import read_prompts
from tests.gateway.endpoints.test_tools import LOOP, TOOLS
from tests.gateway.harness import make_settings

OPTIONS = CollectOptions(max_tokens=64, concurrency=8)
RIGHT = {"reference_calls": [{"name": "forecast", "arguments": {"city": "kiel"}}]}
KIEL = ToolCall("c", "forecast", '{"city": "Kiel"}')
BONN = ToolCall("c", "forecast", '{"city": "Bonn"}')
BROKEN = ToolCall("c", "forecast", '{"town": "Kiel"}')


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def graded(tmp_path: Path, low: Script, top: Script, **line: Any) -> tuple[list[float], dict[str, int]]:
    """Return the grades of both tiers' answers, the same to thirty prompts, and how they came about."""
    lines = [{"prompt": f"Kiel, day {number}?", "tools": TOOLS} | line for number in range(30)]
    backends: dict[str, Backend] = {"small": EchoBackend("small", low), "large": EchoBackend("large", top)}
    settings = make_settings(tmp_path)
    rows = read_prompts(write(tmp_path / "prompts.jsonl", *lines))
    work = tmp_path / "answers.jsonl"
    outcomes = await collect_outcomes(rows, settings, backends, work, OPTIONS, window="")
    # What was answered is read back from the file: nobody is asked twice.
    again = await collect_outcomes(rows, settings, {}, work, OPTIONS, window="")
    assert again.table.scores.tolist() == outcomes.table.scores.tolist()
    assert (outcomes.table.scores == outcomes.table.scores[0]).all()
    return outcomes.table.scores[0].tolist(), dict(outcomes.graded_by)


def calling(*calls: ToolCall) -> Script:
    return Script(text="", tool_calls=calls)


@pytest.mark.parametrize(
    ("low", "top", "line", "grades"),
    [
        (calling(KIEL), calling(KIEL), {}, [1, 1]),
        (calling(BONN), calling(KIEL), {}, [0, 1]),
        (Script(text="Which?"), calling(KIEL), {}, [0, 1]),
        (Script(text="It is 5."), Script(text="5"), {}, [1, 1]),
        (calling(BROKEN), calling(KIEL), {}, [0, 1]),
        (calling(KIEL), calling(BROKEN), {}, [1, 0]),
        (Script(text="It is 5."), calling(KIEL), {"tool_choice": "required"}, [0, 1]),
        (calling(KIEL), calling(BONN), {"reference_calls": [{"name": "forecast", "arguments": {"city": "K"}}]}, [0, 0]),
        (calling(KIEL), calling(BONN), RIGHT, [1, 0]),
        (calling(KIEL), Script(text="No."), {"reference_calls": []}, [0, 1]),
        (calling(KIEL), Script(text="It is 5."), {"reference": "5"}, [0, 1]),
    ],
)  # fmt: skip
async def test_answers_are_graded_by_their_calls(
    tmp_path: Path, low: Script, top: Script, line: dict[str, Any], grades: list[float]
) -> None:
    found, methods = await graded(tmp_path, low, top, **line)
    assert found == grades
    assert sum(methods.values()) == 60


async def test_a_tier_without_tools_is_wrong_and_not_asked(tmp_path: Path) -> None:
    plain: Any = frozenset({"generate", "tokenize"})
    small = EchoBackend("small", capabilities=plain)
    lines = [{"prompt": f"{number}?", "tools": TOOLS} for number in range(30)]
    rows = read_prompts(write(tmp_path / "prompts.jsonl", *lines))
    large = EchoBackend("large", calling(KIEL))
    outcomes = await collect_outcomes(
        rows, make_settings(tmp_path), {"small": small, "large": large}, tmp_path / "a.jsonl", OPTIONS, window=""
    )
    assert (outcomes.table.scores == [0.0, 1.0]).all()
    assert small.requests == []
    assert all(request.tools == rows[0].tools for request in large.requests)


def test_a_line_is_read_as_the_server_reads_a_body(tmp_path: Path) -> None:
    plain, looped = read_prompts(write(tmp_path / "p.jsonl", {"prompt": "hi"}, {"messages": LOOP, "tools": TOOLS}))
    assert (plain.needs_tools, looped.needs_tools, plain.request.tools) == (False, True, ())
    assert looped.request == chat_request(LOOP, TOOLS)
    assert [each.role for each in looped.messages] == ["user", "assistant", "tool"]
    assert looped.messages[1].tool_calls[0].name == "forecast"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"messages": LOOP[:2], "tools": TOOLS}, "call_1"),
        ({"prompt": "a", "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"prompt": "a", "tools": TOOLS, "reference_calls": [{"name": "forecast"}]}, "reference_calls"),
        ({"prompt": "a", "tools": TOOLS, "reference_calls": {}}, "reference_calls"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, Any], problem: str) -> None:
    with pytest.raises(PromptFileError, match=f"line 1.*{problem}"):
        read_prompts(write(tmp_path / "p.jsonl", line))


@pytest.mark.slow
async def test_prompts_with_tools_become_a_router_that_reads_them(tmp_path: Path) -> None:
    """The words say nothing; of many tools the cheap tier picks the wrong one."""
    few, many = TOOLS, [*TOOLS, *({"type": "function", "function": {"name": f"t{n}"}} for n in range(40))]

    def low(request: GenerateRequest) -> Script:
        return calling(KIEL if len(request.tools) < 10 else BONN)

    backends: dict[str, Backend] = {"small": EchoBackend("small", low), "large": EchoBackend("large", calling(KIEL))}
    lines = [{"prompt": f"Kiel, day {n}?", "tools": (few, many)[n % 2]} for n in range(200)]
    rows = read_prompts(write(tmp_path / "prompts.jsonl", *lines))
    settings: Settings = make_settings(tmp_path)
    outcomes = await collect_outcomes(rows, settings, backends, tmp_path / "a.jsonl", OPTIONS, window="")
    router = ArtifactRouter(fit_outcomes(outcomes, FitRequest(seed=0)))
    assert router.reads_tools
    asked = [chat_request([{"role": "user", "content": "Kiel, day 7?"}], tools) for tools in (few, many)]
    good = [each.tiers[0].p_as_good for each in router.predict(asked)]
    assert good[0] > 0.9 > 0.1 > good[1]
