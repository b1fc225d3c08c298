"""Inside a loop of tool calls the model that began the turn goes on, whichever server is asked."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.errors import BackendUnavailable
from backends.testing import EchoBackend, Script
from tests.drills.conversations import drill
from tests.drills.kit import Report
from tests.gateway.agents import DIALECTS, MARKED, Agent, AgentModel, switches
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import LADDER_TOML, Gateway, make_settings, running

# Every turn goes to one of two tiers at random: without a lock half of the steps would switch.
DICE = LADDER_TOML + "\n[policy]\nexploration_share = 1.0\n"
ROUTER = FixedRouter(1, 1.0)


def models(script: Any) -> dict[str, Any]:
    return {"small": EchoBackend("small", script), "large": EchoBackend("large", script)}


@asynccontextmanager
async def two(tmp_path: Path, script: Any, **settings: Any) -> AsyncIterator[list[Gateway]]:
    (tmp_path / "b").mkdir()
    async with (
        running(make_settings(tmp_path, DICE, **settings), models(script), router=ROUTER, seed=1) as first,
        running(make_settings(tmp_path / "b", DICE, **settings), models(script), router=ROUTER, seed=2) as second,
    ):
        yield [first, second]


def agents(clients: list[httpx.AsyncClient], num: int, seed: int) -> list[Agent]:
    """Agents of all protocols that ask any server at any step; some have a name, some the same first words."""
    rng = random.Random(seed)
    found = []
    for place in range(num):
        dialect = DIALECTS[place % len(DIALECTS)]
        named: dict[str, Any] = [
            {},
            {"headers": {"x-opencode-session": f"s{place}"}},
            {"extra": dialect.session(f"k{place}")},
        ][place // 3 % 3]
        name = "the same" if place % 6 == 0 else f"agent {place}"
        found.append(Agent(lambda: rng.choice(clients), name, dialect, **named))
    return found


async def test_a_turn_stays_with_its_model_and_the_next_is_decided_anew(tmp_path: Path, database_url: str) -> None:
    async with running(
        make_settings(tmp_path, DICE, database__url=database_url), models(AgentModel()), router=ROUTER
    ) as gateway:
        agent = Agent(lambda: gateway.client, "one")
        for _ in range(12):
            await agent.take_turn(3)
        assert switches(agent.seen) == []
        assert {each.tier for each in agent.seen} == {1, 2}
        assert len({each.affinity for each in agent.seen}) == 1
        assert {each.reason for each in agent.seen if each.step} == {"locked"}
        rows = {row.request_id: row for row in await gateway.rows()}
        for each in agent.seen:
            row = rows[each.request_id]
            assert (row.turn, row.step, row.turn_id is not None) == (each.turn, each.step, each.step > 0)
            if row.turn_id is not None:
                assert (row.propensity, row.propensities) == (1.0, {each.tier: 1.0})
                assert rows[row.turn_id].step == 0
        assert len({row.conversation for row in rows.values()}) == 1


@pytest.mark.db
@pytest.mark.parametrize("has_redis", [True, False])
async def test_two_servers_keep_the_lock_without_affinity(
    tmp_path: Path, postgres_url: str, redis_url: str, has_redis: bool
) -> None:
    shared = {"redis__url": redis_url} if has_redis else {}
    async with two(tmp_path, AgentModel(), database__url=postgres_url, **shared) as servers:
        team = agents([each.client for each in servers], 12, seed=3)
        for _ in range(4):
            for agent in team:
                await agent.take_turn(3)
        assert [switch for agent in team for switch in switches(agent.seen)] == []
        assert {each.tier for agent in team for each in agent.seen} == {1, 2}


@pytest.mark.db
async def test_the_drill_finds_nothing_on_a_small_scale(postgres_url: str, redis_url: str) -> None:
    report = Report("conversations", seed=7)
    await drill(report, 60, 6, 0.03, postgres_url, redis_url)
    assert report.broken == []
    assert report.figures["failures_injected"] > 0
    assert report.figures["unmarked"] == 0


@pytest.mark.slow
async def test_a_restart_reads_the_lock_back_and_age_ends_it(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, DICE, database__url=database_url)
    agent = Agent(lambda: None, "one")  # type: ignore[arg-type, return-value]
    agent.num_turns = 1
    agent.history.append({"role": "user", "content": "9 looks"})
    for step in range(8):
        async with running(settings, models(AgentModel()), router=ROUTER, seed=step) as gateway:
            agent.pick = lambda gateway=gateway: gateway.client  # type: ignore[misc]
            await agent.go_on(step)
    assert switches(agent.seen) == []
    assert [each.reason for each in agent.seen[1:]] == ["locked"] * 7
    async with running(settings, models(AgentModel()), router=ROUTER) as gateway:
        gateway.parts.request_router._sessions._clock = lambda: 4e9
        agent.pick = lambda: gateway.client
        await agent.ask(8)
        assert agent.seen[-1].reason != "locked"


async def test_a_failure_leaves_the_lock_and_says_so(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, LADDER_TOML, database__url=database_url, policy__fallback="any")
    backends = models(AgentModel())
    async with running(settings, backends, router=ROUTER) as gateway:
        agent = Agent(lambda: gateway.client, "one")
        await agent.take_turn(1)
        began = agent.seen[0].tier
        backends["small"]._script = Script(fail_before=BackendUnavailable("gone"))
        agent.num_turns += 1
        agent.history.append({"role": "user", "content": "3 looks"})
        backends["small"]._script = AgentModel()
        await agent.go_on(0)
        backends["small"]._script = Script(fail_before=BackendUnavailable("gone"))
        await agent.go_on(1)
        backends["small"]._script = AgentModel()
        await agent.ask(2)
        assert began == 1
        assert [(each.tier, each.reason) for each in agent.seen[-3:]] == [
            (1, "sufficient"),
            (2, "fallback"),
            (2, "locked"),
        ]
        last, left, first = (await gateway.rows())[:3]
        # What the failure brought about is a decision of its own; later steps follow it.
        assert (first.turn_id, left.turn_id, last.turn_id) == (None, None, left.request_id)
        assert (left.decided_tier, left.final_tier, left.reason) == (1, 2, "locked")


async def test_a_tier_that_is_known_to_be_down_is_left_and_marked(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path), models(AgentModel()), router=ROUTER) as gateway:
        agent = Agent(lambda: gateway.client, "one")
        agent.num_turns = 1
        agent.history.append({"role": "user", "content": "3 looks"})
        await agent.go_on(0)
        gateway.parts.request_router.unavailable = frozenset({1})
        await agent.ask(1)
        gateway.parts.request_router.unavailable = frozenset()
        gateway.parts.request_router.kill_switch = True
        await agent.ask(1)
        assert [(each.tier, each.reason) for each in agent.seen] == [
            (1, "sufficient"),
            (2, "unlocked"),
            (2, "kill_switch"),
        ]
        assert {each.reason for each in switches(agent.seen)} <= MARKED
        decision = (await gateway.client.get(f"/v1/requests/{agent.seen[1].request_id}")).json()
        assert decision["decision"]["propensity"] == 1.0
        assert decision["conversation"]["locked"] is False


async def test_a_side_request_neither_takes_nor_moves_the_lock(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, DICE, database__url=database_url)
    async with running(settings, models(AgentModel()), router=ROUTER) as gateway:
        session = {"session-id": "s"}
        agent = Agent(lambda: gateway.client, "one", headers=session)
        agent.num_turns = 1
        agent.history.append({"role": "user", "content": "9 looks"})
        for step in range(9):
            await agent.go_on(step)
            side = {"model": "auto", "messages": [{"role": "user", "content": "0 words as a title"}]}
            answer = await gateway.client.post("/v1/chat/completions", json=side, headers=session)
            assert answer.headers["x-suffice-reason"] != "locked"
        assert switches(agent.seen) == []
        rows = [row for row in await gateway.rows() if row.turn is None]
        assert len(rows) == 9
        assert {row.session_id for row in rows} == {"s"}


async def test_a_client_may_send_its_affinity_back(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path), models(AgentModel()), router=ROUTER) as gateway:
        agent = Agent(lambda: gateway.client, "one", headers={"x-suffice-affinity": "0123456789abcdef"})
        await agent.take_turn(0)
        assert agent.seen[0].affinity != "0123456789abcdef"
        assert len(agent.seen[0].affinity) == 16
