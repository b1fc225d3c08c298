"""Answers whose calls are wrong for certain: a higher tier answers in their place, before anything was sent."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from backends.errors import BackendUnavailable
from backends.protocol import GenerateRequest, ToolCall
from backends.testing import EchoBackend, Script
from tests.gateway.answering.test_escalation import ROUTER, SURE, UNSURE, asked, ladder, text_of, toml, tries
from tests.gateway.endpoints.test_tools import TOOLS
from tests.gateway.harness import events, make_settings, running
from tests.gateway.raw import RawClient, eventually

RIGHT = ToolCall("call_1", "forecast", '{"city": "Kiel"}')
WRONG = ToolCall("call_1", "forecast", '{"city": 5}')
SOUND, BROKEN = Script(text="", tool_calls=(RIGHT,)), Script(text="", tool_calls=(WRONG,))
PLAIN: Any = frozenset({"generate", "tokenize", "tools", "structured_output"})


def calls_of(streamed: str) -> list[tuple[str, str]]:
    """Name and arguments of the calls that a stream's events make."""
    found: dict[int, list[str]] = {}
    for event in events(streamed):
        for choice in () if event == "[DONE]" else json.loads(event)["choices"]:
            for piece in choice["delta"].get("tool_calls", ()):
                found.setdefault(piece["index"], [piece["function"].get("name", ""), ""])
                found[piece["index"]][1] += piece["function"].get("arguments", "")
    return [(name, arguments) for name, arguments in found.values()]


@pytest.mark.parametrize("capable", [True, False], ids=["with log-probabilities", "without"])
async def test_a_faulty_call_is_made_by_the_next_tier(tmp_path: Path, database_url: str, capable: bool) -> None:
    backends = ladder(low=BROKEN, mid=SOUND, **({} if capable else {"capabilities": PLAIN}))
    settings = make_settings(tmp_path, toml(), database__url=database_url)
    async with running(settings, backends, router=ROUTER) as gateway:
        response = await gateway.chat("Kiel?", tools=TOOLS)
        (made,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert made["function"] == {"name": "forecast", "arguments": RIGHT.arguments}
        assert (response.headers["x-suffice-tier"], response.headers["x-suffice-reason"]) == ("2", "escalated")
        row = await gateway.row()
        assert tries(row) == [(1, "faulty"), (2, None)]
        assert (row.attempts[0].cost_nano_usd, row.cost_usd) == (1_000_000, Decimal("0.011"))
        assert row.finish_reason == "tool_calls"
        metrics = (await gateway.client.get("/metrics")).text
        assert 'suffice_failed_attempts_total{error="faulty",tier="1"} 1.0' in metrics
        assert "suffice_faulty_answers_total{" not in metrics
        gateway.assert_idle()


async def test_a_sound_call_is_judged_by_its_confidence(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(low=SOUND, mid=SOUND), router=ROUTER) as gateway:
        response = await gateway.chat("Kiel?", tools=TOOLS)
        (attempt, *_) = (await gateway.row()).attempts
        assert attempt.confidence is not None
        assert response.status_code == 200


@pytest.mark.parametrize(("faults", "tier"), [(True, "2"), (False, "1")])
async def test_the_policy_says_what_goes_up(tmp_path: Path, faults: bool, tier: str) -> None:
    settings = make_settings(tmp_path, toml(faults=faults, low_confidence=False))
    backends = ladder(low=BROKEN, mid=SOUND)
    async with running(settings, backends, router=ROUTER) as gateway:
        assert (await gateway.chat("Kiel?", tools=TOOLS)).headers["x-suffice-tier"] == tier
        # Nobody asks for log-probabilities that nobody reads.
        assert all(request.sampling.logprobs is None for request in asked(gateway, "low"))


async def test_without_low_confidence_a_doubted_text_is_sent(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml(low_confidence=False)), ladder(), router=ROUTER) as gateway:
        assert (await gateway.chat("well?")).headers["x-suffice-tier"] == "1"
        assert (await gateway.row()).attempts[0].confidence is None


async def test_a_text_of_the_wrong_form_goes_up(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, toml(low_confidence=False))
    async with running(settings, ladder(low=SURE, mid=Script(text='{"a": 1}')), router=ROUTER) as gateway:
        response = await gateway.chat("Kiel?", response_format={"type": "json_object"})
        assert response.json()["choices"][0]["message"]["content"] == '{"a": 1}'
        assert tries(await gateway.row()) == [(1, "faulty"), (2, None)]


async def test_one_faulty_choice_is_enough(tmp_path: Path) -> None:
    def low(request: GenerateRequest) -> Script:
        return BROKEN if request.request_id.endswith("-1") else SOUND

    settings = make_settings(tmp_path, toml(low_confidence=False))
    async with running(settings, ladder(low=low, mid=SOUND), router=ROUTER) as gateway:
        assert (await gateway.chat("Kiel?", tools=TOOLS, n=3)).headers["x-suffice-tier"] == "2"


@pytest.mark.parametrize("mid", [Script(fail_before=BackendUnavailable("down")), BROKEN], ids=["down", "no better"])
async def test_where_nobody_does_better_an_answer_is_sent_all_the_same(tmp_path: Path, mid: Script) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(low=BROKEN, mid=mid), router=ROUTER) as gateway:
        response = await gateway.chat("Kiel?", tools=TOOLS)
        (made,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert made["function"]["arguments"] == WRONG.arguments
        metrics = (await gateway.client.get("/metrics")).text
        assert 'suffice_faulty_answers_total{fault="breaks_schema"' in metrics
        gateway.assert_idle()


def thinking(calls: tuple[ToolCall, ...]) -> Script:
    return Script(text="", reasoning="Which city is it?", tool_calls=calls)


@pytest.mark.parametrize(
    ("low", "tier", "made"),
    [
        (BROKEN, "2", RIGHT.arguments),
        (thinking((WRONG,)), "2", RIGHT.arguments),
        (SOUND, "1", RIGHT.arguments),
        # What was sent is not taken back: text came first.
        (Script(text="I look. ", tool_calls=(WRONG,)), "1", WRONG.arguments),
    ],
    ids=["calls", "thought and calls", "sound calls", "text and calls"],
)
async def test_a_streams_calls_are_held_until_they_are_complete(
    tmp_path: Path, low: Script, tier: str, made: str
) -> None:
    settings = make_settings(tmp_path, toml(hold_calls=True))
    async with running(settings, ladder(low=low, mid=SOUND), router=ROUTER) as gateway:
        response = await gateway.chat("Kiel?", tools=TOOLS, stream=True)
        assert [arguments for _, arguments in calls_of(response.text)] == [made]
        assert response.headers["x-suffice-tier"] == tier
        row = await gateway.row()
        assert (row.final_tier, row.finish_reason) == (int(tier), "tool_calls")
        assert tries(row)[0] == (1, "faulty" if tier == "2" else None)
        gateway.assert_idle()


async def test_a_streams_text_is_not_held_for_calls(tmp_path: Path) -> None:
    """Nor is it judged by a first word: the policy holds no tokens."""
    settings = make_settings(tmp_path, toml(hold_calls=True))
    low = Script(text=f"{UNSURE} {UNSURE}", hang_after=1)
    async with running(settings, ladder(low=low), router=ROUTER) as gateway:
        body = {"model": "auto", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "stream": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if UNSURE in line:
                    break
        assert response.headers["x-suffice-tier"] == "1"


async def test_without_the_switch_a_streams_calls_are_sent_as_they_come(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(low=BROKEN, mid=SOUND), router=ROUTER) as gateway:
        response = await gateway.chat("Kiel?", tools=TOOLS, stream=True)
        assert calls_of(response.text) == [("forecast", WRONG.arguments)]
        assert text_of(response.text) == ""
        assert isinstance(gateway.backends["mid"], EchoBackend)
        assert not asked(gateway, "mid")


async def test_a_client_that_leaves_while_calls_are_held_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, toml(hold_calls=True))
    low = Script(text="", reasoning="Which city is it?", tool_calls=(WRONG,), hang_after=2)
    async with running(settings, ladder(low=low, mid=SOUND), router=ROUTER) as gateway:
        body = {"model": "auto", "messages": [{"role": "user", "content": "Kiel?"}], "tools": TOOLS, "stream": True}
        async with RawClient(gateway.url) as client:
            await client.post("/v1/chat/completions", body)
            await eventually(lambda: gateway.backends["low"].num_running == 1)
            client.reset()
        await eventually(lambda: gateway.backends["low"].num_cancelled == 1)
        await eventually(lambda: gateway.parts.admission.num_running == 0)
        row = await gateway.row()
        assert (row.finish_reason, row.final_tier, asked(gateway, "mid")) == ("cancelled", 1, [])
        gateway.assert_idle()
