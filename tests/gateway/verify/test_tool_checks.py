"""Answers with calls over a real gateway: faulty ones are known without a check, the others are compared as calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.protocol import ToolCall
from backends.testing import EchoBackend, Script
from gateway.control.floor_findings import FloorEvidence, find_floor
from gateway.store.monitoring import MonitorReader
from gateway.store.tables import verification_texts, verifications
from tests.gateway.endpoints.test_tools import IMAGE, LOOP, TOOLS
from tests.gateway.harness import Gateway, echo_backends, make_settings, running
from tests.gateway.records import NOW
from tests.gateway.verify.test_worker import ALL, CHEAP, read, until_done

ASKED: dict[str, Any] = {"tools": TOOLS, **CHEAP}
KIEL = ToolCall("call_1", "forecast", '{"city": "Kiel"}')
NOW_CALL = ToolCall("call_2", "now", "{}")


def calling(*calls: ToolCall, text: str = "") -> Script:
    return Script(text=text, tool_calls=calls)


FAULTY: dict[str, tuple[Script, dict[str, Any]]] = {
    "not_json": (calling(ToolCall("c", "forecast", '{"city": ')), {}),
    "unknown_tool": (calling(ToolCall("c", "weather", "{}")), {}),
    "breaks_schema": (calling(ToolCall("c", "forecast", '{"town": "Kiel"}')), {}),
    "missing_call": (Script(text="Rain."), {"tool_choice": "required"}),
    "forbidden_call": (calling(KIEL, NOW_CALL), {"parallel_tool_calls": False}),
    "breaks_format": (Script(text="Rain."), {"tools": None, "response_format": {"type": "json_object"}}),
}


@pytest.mark.parametrize("fault", FAULTY)
async def test_a_faulty_answer_is_checked_for_nothing(tmp_path: Path, database_url: str, fault: str) -> None:
    """Although hardly any answer is drawn, this one is in the sample, with probability 1."""
    script, more = FAULTY[fault]
    settings = make_settings(tmp_path, database__url=database_url, **{**ALL, "policy__sampling_share": 1e-9})
    async with running(settings, echo_backends(script)) as gateway:
        body = {name: value for name, value in (ASKED | more).items() if value is not None}
        assert (await gateway.chat("Kiel?", **body)).status_code == 200
        (row,) = await read(gateway.parts.store, verifications)
        logged = await gateway.row()
        assert await read(gateway.parts.store, verification_texts) == []
        assert gateway.backends["large"].requests == []
        metrics = (await gateway.client.get("/metrics")).text
    assert (row["status"], row["direction"], row["tier"], row["against_tier"]) == ("done", "up", 1, 2)
    assert (row["verdict"], row["p_good"], row["cost_nano_usd"], row["grader"]) == (0, 0.0, 0, "validator")
    assert (row["stratum"], row["inclusion_probability"], logged.verify_probability) == ("faulty", 1.0, 1.0)
    assert row["scores"] == {"validator": 0.0, f"validator.{fault}": 1.0}
    assert row["finished_at"] >= logged.created_at
    assert f'suffice_faulty_answers_total{{fault="{fault}",tier="1"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("body", "probability"),
    [
        ({"model": "simple", "tools": TOOLS}, None),
        ({"n": 2, **ASKED}, None),
        ({"tools": TOOLS, "suffice": {"min_tier": 2}}, 1.0),
    ],
    ids=["the caller named the tier", "several choices", "the top tier's own"],
)
async def test_a_fault_that_says_nothing_of_the_routing_makes_no_row(
    tmp_path: Path, body: dict[str, Any], probability: float | None
) -> None:
    script = FAULTY["not_json"][0]
    settings = make_settings(tmp_path, policy__sampling__down_share=0.0, **ALL)
    async with running(settings, echo_backends(script, script)) as gateway:
        assert (await gateway.chat("Kiel?", **body)).status_code == 200
        assert await read(gateway.parts.store, verifications) == []


async def test_an_answer_cut_off_by_its_caller_is_not_faulty(tmp_path: Path) -> None:
    script = Script(text="one two three four")
    settings = make_settings(tmp_path, **{**ALL, "policy__sampling_share": 0.0})
    async with running(settings, echo_backends(script)) as gateway:
        answer = await gateway.chat("Kiel?", tool_choice="required", max_tokens=1, **ASKED)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert await read(gateway.parts.store, verifications) == []


PAIRS: dict[str, tuple[Script, Script, int, str]] = {
    "the same": (
        calling(KIEL, NOW_CALL),
        calling(NOW_CALL, ToolCall("x", "forecast", '{ "city":"Kiel" }')),
        1,
        "calls",
    ),
    "nearly the same": (calling(KIEL), calling(ToolCall("x", "forecast", '{"city": "KIEL."}')), 1, "calls"),
    "another city": (calling(KIEL), calling(ToolCall("x", "forecast", '{"city": "Bonn"}')), 0, "calls"),
    "a call against a text": (calling(KIEL), Script(text="Which city?"), 0, "calls"),
    "a text against a call": (Script(text="Which city?"), calling(KIEL), 0, "calls"),
    "two texts": (Script(text="It is 5."), Script(text="The answer is 5."), 1, "compare"),
    "the top's is faulty": (calling(KIEL), FAULTY["breaks_schema"][0], 1, "validator"),
}


@pytest.mark.parametrize("pair", PAIRS)
async def test_calls_are_compared_with_the_top_tiers(tmp_path: Path, database_url: str, pair: str) -> None:
    cheap, top, verdict, grader = PAIRS[pair]
    settings = make_settings(tmp_path, database__url=database_url, **ALL)
    async with running(settings, echo_backends(cheap, top)) as gateway:
        body = {"messages": LOOP, "tool_choice": "auto", **ASKED}
        assert (await gateway.chat(**body)).status_code == 200
        (row,) = await until_done(gateway.parts.store)
        (asked,) = gateway.backends["large"].requests
        (served,) = gateway.backends["small"].requests
    assert (row["status"], row["verdict"], row["grader"], row["error"]) == ("done", verdict, grader, None)
    assert (asked.messages, asked.tools, asked.tool_choice) == (served.messages, served.tools, served.tool_choice)


async def test_a_lower_tiers_faulty_calls_are_no_reason_to_stay_below(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, database__url=database_url, policy__sampling__down_share=1.0, **ALL)
    async with running(settings, echo_backends(FAULTY["unknown_tool"][0], calling(KIEL))) as gateway:
        assert (await gateway.chat("Kiel?", tools=TOOLS, suffice={"min_tier": 2})).status_code == 200
        (row,) = await until_done(gateway.parts.store)
    assert (row["direction"], row["verdict"], row["grader"]) == ("down", 0, "validator")


async def test_a_form_is_asked_of_the_checking_tier_too(tmp_path: Path) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    script = Script(text='{"a": 1}')
    async with running(make_settings(tmp_path, **ALL), echo_backends(script, script)) as gateway:
        assert (await gateway.chat("Kiel?", response_format=wanted, **CHEAP)).status_code == 200
        (row,) = await until_done(gateway.parts.store)
        (asked,) = gateway.backends["large"].requests
    assert row["verdict"] == 1
    assert (asked.output_format.kind, asked.output_format.strict) == ("json_schema", True)


async def test_what_the_checking_tier_cannot_take_is_not_drawn(tmp_path: Path) -> None:
    plain: Any = frozenset({"generate", "logprobs", "tokenize"})
    backends = echo_backends(calling(KIEL)) | {"large": EchoBackend("large", capabilities=plain)}
    async with running(make_settings(tmp_path, **ALL), backends) as gateway:
        assert (await gateway.chat("Kiel?", tools=TOOLS)).status_code == 200
        assert await read(gateway.parts.store, verifications) == []
        assert (await gateway.row()).verify_probability == 0.0


@pytest.mark.parametrize(("retention", "num"), [("full", 1), ("digest", 0)])
async def test_images_are_kept_for_a_check_only_where_texts_are(tmp_path: Path, retention: str, num: int) -> None:
    settings = make_settings(tmp_path, log__prompts=retention, **ALL)
    async with running(settings) as gateway:
        content = [{"type": "text", "text": "5"}, IMAGE]
        answer = await gateway.chat(messages=[{"role": "user", "content": content}], **CHEAP)
        assert answer.status_code == 200, answer.text
        assert len(await read(gateway.parts.store, verifications)) == num


async def test_the_weights_of_both_strata_bring_back_all_answers(tmp_path: Path, database_url: str) -> None:
    """Of 200 answers a quarter is faulty; the others are as good as the top tier's, and a third of them is drawn."""
    num = 0

    def small(request: Any) -> Script:
        nonlocal num
        num += 1
        return FAULTY["not_json"][0] if num % 4 == 0 else calling(KIEL)

    settings = make_settings(
        tmp_path, database__url=database_url, **{**ALL, "policy__sampling_share": 0.33, "verification__worker": False}
    )
    async with running(settings, echo_backends(small, calling(KIEL))) as gateway:
        for _ in range(200):
            assert (await gateway.chat("Kiel?", **ASKED)).status_code == 200
        finding = await _finding(gateway)
        rows = await read(gateway.parts.store, verifications)
        faulty = [row for row in rows if row["stratum"] == "faulty"]
        assert (len(faulty), len(rows) > 60) == (50, True)
        # Drawn and not done yet: as many as the queue has lost say nothing, and the faulty ones weigh no more for it.
        assert finding.certificate.num_requests == 200
        assert finding.certificate.loss == pytest.approx(0.25)


async def _finding(gateway: Gateway) -> Any:
    reader = MonitorReader(gateway.parts.store)
    rows = await reader.newest_checked(created_since=NOW, limit=1000)
    evidence = FloorEvidence(rows, await reader.traffic(NOW), await reader.drawn(NOW), None)
    policy = gateway.settings.policy
    return find_floor(policy, (await gateway.rows())[0].router_version, 2, evidence, {})
