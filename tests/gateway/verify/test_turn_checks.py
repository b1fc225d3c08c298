"""A turn is drawn for checks once, and counts once in what is concluded from them."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from backends.protocol import ToolCall
from backends.testing import EchoBackend, Script
from gateway.admin.policy_replay import PolicyReplay
from gateway.control.floor_findings import FloorEvidence, find_floor
from gateway.store.monitoring import MonitorReader
from gateway.store.tables import requests, verifications
from tests.gateway.agents import Agent, AgentModel
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import Gateway, make_settings, running

NOW = datetime(2020, 1, 1, tzinfo=UTC)
DRAWN: dict[str, Any] = {
    "verification__enabled": True,
    "verification__worker": False,
    "policy__sampling_share": 0.3,
    "policy__sampling__edges": [0.5],
    "policy__sampling__factors": [1.0, 1.0],
    "policy__exploration_share": 0.0,
}
NUM_TURNS, NUM_STEPS = 60, 4


async def played(gateway: Gateway, num_turns: int = NUM_TURNS) -> None:
    for place in range(num_turns):
        await Agent(lambda: gateway.client, f"task {place}").take_turn(NUM_STEPS - 1)


async def read(gateway: Gateway, *columns: Any) -> list[Any]:
    async with gateway.parts.store.transaction() as connection:
        return list(await connection.execute(select(*columns)))


async def test_the_steps_of_a_turn_share_its_draw(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, database__url=database_url, **DRAWN)
    models = {name: EchoBackend(name, AgentModel()) for name in ("small", "large")}
    async with running(settings, models, router=FixedRouter(1, 1.0)) as gateway:
        await played(gateway)
        turn_of = {row.request_id: row.turn_id or row.request_id for row in await gateway.rows()}
        steps = defaultdict(list)
        for row in await read(gateway, verifications.c.request_id, verifications.c.inclusion_probability):
            steps[turn_of[row.request_id]].append(row.inclusion_probability)
        # Each turn is checked whole or not at all, with the probability of its one draw.
        assert set(map(tuple, steps.values())) == {(0.3,) * NUM_STEPS}
        assert 5 < len(steps) < 40
        assert {row.verify_probability for row in await gateway.rows()} == {0.3}
        async with gateway.parts.store.transaction() as connection:
            done = {"status": "done", "finished_at": datetime.now(UTC), "p_good": 0.5, "verdict": 1}
            await connection.execute(update(verifications).values(**done))
        reader = MonitorReader(gateway.parts.store)
        (traffic,) = (await reader.traffic(NOW)).values()
        (drawn,) = (await reader.drawn(NOW)).values()
        assert (traffic.num_requests, drawn.num_drawn, drawn.num_done) == (NUM_TURNS, len(steps), len(steps))
        found = await reader.newest_checked(created_since=NOW, limit=1000)
        rows = await reader.by_turn(found)
        assert (len(found), len(rows)) == (NUM_STEPS * len(steps), len(steps))
        assert {(row.loss, row.inclusion) for row in rows} == {(0.5, 0.3)}
        # A test that looks at every answer sees one of each turn.
        assert len([row async for row in reader.checked(finished_since=NOW, limit=1000)]) == len(steps)
        evidence = FloorEvidence(rows, await reader.traffic(NOW), await reader.drawn(NOW), None)
        finding = find_floor(settings.policy, (await gateway.rows())[0].router_version, 2, evidence, {})
        assert (finding.certificate.num_requests, finding.certificate.num_checked) == (NUM_TURNS, len(steps))


async def test_faults_and_draws_of_one_turn_make_one_outcome(tmp_path: Path, database_url: str) -> None:
    """In each turn of four steps the second call is faulty: a loss of a quarter, whether the turn was drawn or not."""
    agent = AgentModel()

    def small(request: Any) -> Script:
        made = agent(request)
        if sum(message.role == "tool" for message in request.messages) == 1:
            return Script(text="", tool_calls=(ToolCall(made.tool_calls[0].call_id, "unheard_of", "{}"),))
        return made

    settings = make_settings(tmp_path, database__url=database_url, **DRAWN)
    models = {"small": EchoBackend("small", small), "large": EchoBackend("large", agent)}
    async with running(settings, models, router=FixedRouter(1, 1.0)) as gateway:
        await played(gateway, 30)
        async with gateway.parts.store.transaction() as connection:
            done = {"status": "done", "finished_at": datetime.now(UTC), "p_good": 1.0, "verdict": 1}
            await connection.execute(update(verifications).where(verifications.c.status != "done").values(**done))
        reader = MonitorReader(gateway.parts.store)
        rows = await reader.by_turn(await reader.newest_checked(created_since=NOW, limit=1000))
        assert len(rows) == 30
        assert {row.inclusion for row in rows} == {0.3, 1.0}
        assert [row.loss / row.inclusion for row in rows] == pytest.approx([0.25] * 30)


async def test_another_server_goes_on_with_the_draw(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, database__url=database_url, **{**DRAWN, "policy__sampling_share": 0.999})
    agent = Agent(lambda: None, "one")  # type: ignore[arg-type, return-value]
    agent.history.append({"role": "user", "content": "9 looks"})
    for step in range(3):
        models = {name: EchoBackend(name, AgentModel()) for name in ("small", "large")}
        async with running(settings, models, router=FixedRouter(1, 1.0)) as gateway:
            agent.pick = lambda gateway=gateway: gateway.client  # type: ignore[misc]
            await agent.go_on(step)
            found = await read(gateway, verifications.c.turn_id, verifications.c.inclusion_probability)
            ids = await read(gateway, requests.c.request_id)
    first = min(row.request_id for row in ids)
    assert sorted(found, key=str) == sorted([(None, 0.999), (first, 0.999), (first, 0.999)], key=str)


async def test_a_policy_is_tried_on_turns_with_what_all_their_steps_cost(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, **DRAWN)
    models = {name: EchoBackend(name, AgentModel()) for name in ("small", "large")}
    async with running(settings, models, router=FixedRouter(1, 1.0)) as gateway:
        await played(gateway, 5)
        rows = await gateway.rows()
        replay = PolicyReplay(settings.policy, gateway.parts.catalog, until_s=float("inf"))
        checked = {row.request_id: (0.5, 0.3) for row in rows}
        assert replay.add(rows, checked)
        report = replay.report()
        assert report["num_rows"] == 5
        assert report["cost"]["logged_usd"] == pytest.approx(float(sum(row.cost_usd for row in rows)))
        assert report["cost"]["expected_usd"] == pytest.approx(report["cost"]["logged_usd"])
        assert report["quality"]["num_graded"] == 5
