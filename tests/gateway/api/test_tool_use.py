"""Requests with tools leave in the log what they say of them, whichever router serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.protocol import FREE_CHOICE, Image, SamplingParams, Tool, ToolCall, ToolChoice
from classifier.log_view import tool_values
from classifier.tool_features import TOOL_FEATURES, chat_request
from gateway.api.chat_codec import ChatDecoder
from gateway.api.generation_body import BodyLimits
from gateway.api.request import InferenceRequest, TextPart, ToolResultPart, Turn, media_in
from gateway.api.tool_use import read_tool_features
from gateway.config.sections import ServerConfig
from gateway.errors import InvalidRequest
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.endpoints.test_tools import LOOP, TOOLS
from tests.gateway.harness import make_settings, running
from tests.shared_data import shared_data

OFFERED = (Tool("forecast", "Weather of one city.", TOOLS[0]["function"]["parameters"]), Tool("now"))
ASK = Turn("user", (TextPart("Kiel?"),))
CALLS = Turn("assistant", (ToolCall("call_1", "forecast", "{}"),))


def read(*turns: Turn, choice: ToolChoice = FREE_CHOICE) -> dict[str, float]:
    asked = InferenceRequest(
        model="auto", prompts=(turns,), sampling=SamplingParams(), tools=OFFERED, tool_choice=choice
    )
    return dict(zip(TOOL_FEATURES, read_tool_features(asked, asked.turns), strict=True))


def results(role: str, is_error: bool = False) -> Turn:
    return Turn(role, (ToolResultPart("call_1", (TextPart("rain"), Image("data:,")), is_error),))


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_result_does_not_begin_a_turn(role: str) -> None:
    found = read(ASK, CALLS, results(role))
    assert (found["loop_depth"] > 0, found["is_last_result_error"]) == (True, 0.0)
    assert read(ASK, CALLS, results(role, is_error=True))["is_last_result_error"] == 1.0
    # What an agent adds behind a result opens no turn; an answer does.
    assert read(ASK, CALLS, results(role), ASK)["loop_depth"] > 0
    assert read(ASK, CALLS, results(role), Turn("assistant", (TextPart("Rain."),)), ASK)["loop_depth"] == 0.0


def test_the_choice_is_read() -> None:
    found = read(ASK, choice=ToolChoice("required", ("now",)))
    assert (found["is_call_required"], found["is_tool_named"]) == (1.0, 1.0)
    assert read(ASK, choice=ToolChoice("none"))["is_call_forbidden"] == 1.0


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        "required",
        {"type": "function", "function": {"name": "now"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
        },
    ],
)
def test_every_choice_reads_alike_in_both(choice: Any) -> None:
    decoder = ChatDecoder(BodyLimits(ServerConfig(), {"any": 1}))
    asked = decoder({"model": "auto", "messages": LOOP, "tools": TOOLS, "tool_choice": choice}, {})
    expected: Any = chat_request(LOOP, TOOLS, choice).tools
    assert read_tool_features(asked, asked.turns) == pytest.approx(expected)


async def test_the_log_keeps_it_and_of_others_nothing(tmp_path: Path, database_url: str) -> None:
    """The same as a file of prompts would say, so that both teach the same."""
    settings = make_settings(tmp_path, database__url=database_url)
    async with running(settings, router=FixedRouter(0.9, 0.95)) as gateway:
        assert (await gateway.chat(messages=LOOP, tools=TOOLS)).status_code == 200
        assert (await gateway.chat("hi")).status_code == 200
        plain, asked = await gateway.rows()
    expected: Any = chat_request(LOOP, TOOLS).tools
    assert tool_values(asked.features) == pytest.approx(expected)
    assert not set(plain.features) & set(TOOL_FEATURES)


def test_agents_requests_say_the_same_as_files_of_prompts() -> None:
    """Two readers of one thing: a body as it is served, and as it stands in a file."""
    folder, decoder = shared_data("agent_requests") / "chat", ChatDecoder(BodyLimits(ServerConfig(), {"any": 1}))
    num_loops = 0
    for file in sorted(folder.glob("*.json")):
        body = json.loads(file.read_text())["request"]["body"]
        try:
            asked = decoder(body | {"model": "auto"}, {})
        except InvalidRequest:
            continue  # those that are to be refused
        if not asked.tools or media_in(asked.other_parts):
            continue
        found = read_tool_features(asked, asked.turns)
        assert found == pytest.approx(chat_request(body["messages"], body["tools"], body.get("tool_choice")).tools), (
            file
        )
        num_loops += found[TOOL_FEATURES.index("loop_depth")] > 0
    assert num_loops > 3
