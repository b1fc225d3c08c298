"""Agents at work on two servers that share nothing but the log and Redis: does a turn ever change its model?

``python -m tests.drills.conversations --turns 10000 --seed 1`` starts two servers on a PostgreSQL and a Redis of its
own (or those of ``--database-url`` and ``--redis-url``). Every turn's tier is drawn at random, each step asks either,
and tiers fail before their first token as often as ``--failing`` says. Agents speak all three protocols; some name
their conversation in a header, some in the body, some not at all, and some of those begin with the same words. The
status is 1 where a step inside a loop changes its tier without a failure, or without saying so, or where the log tells
another story.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from backends.testing import EchoBackend
from gateway.store.records import RequestRecord
from tests.drills.kit import Report, free_port
from tests.faults import PrivatePostgres
from tests.gateway.agents import DIALECTS, MARKED, Agent, AgentModel, StepSeen, switches
from tests.gateway.control.processes import RedisProcess
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import LADDER_TOML, Gateway, make_settings, running

# A tier of each turn is drawn; what fails is answered by the other one, whichever that is.
TOML = LADDER_TOML + '\n[policy]\nexploration_share = 1.0\nfallback = "any"\n'
_TURNS_EACH = 10
_PAGE = 1000


async def play(servers: Sequence[Gateway], num_turns: int, num_agents: int, seed: int) -> list[Agent]:
    """Let agents take so many turns together, ``num_agents`` of them at a time."""
    rng, found, left = random.Random(seed), list[Agent](), iter(range(-(-num_turns // _TURNS_EACH)))

    def pick() -> httpx.AsyncClient:
        return rng.choice(servers).client

    async def work() -> None:
        for place in left:
            dialect = DIALECTS[place // 4 % len(DIALECTS)]
            named: list[dict[str, Any]] = [
                {},
                {"headers": {"x-opencode-session": f"s-{seed}-{place}"}},
                {"headers": {"x-claude-code-session-id": "shared", "x-claude-code-agent-id": f"{seed}-{place}"}},
                {"extra": dialect.session(f"{seed}-{place}")},
            ]
            name = "all alike" if place % 8 == 0 else f"agent {place}"
            agent = Agent(pick, name, dialect, **named[place % 4])
            found.append(agent)
            for _ in range(_TURNS_EACH):
                await agent.take_turn(rng.choice((0, 1, 2, 3, 5, 8)))

    await asyncio.gather(*(work() for _ in range(num_agents)))
    return found


async def rows_of(gateway: Gateway) -> dict[str, RequestRecord]:
    """The whole log."""
    found: dict[str, RequestRecord] = {}
    before: str | None = None
    while page := await gateway.parts.store.recent(limit=_PAGE, before_id=before):
        found |= {row.request_id: row for row in page}
        before = page[-1].request_id
    return found


def judge(report: Report, agents: Sequence[Agent], rows: dict[str, RequestRecord], num_failed: int) -> None:
    """Compare what the agents saw with what was injected, and with the log."""
    seen = [each for agent in agents for each in agent.seen]
    left = [each for agent in agents for each in switches(agent.seen)]
    inside = [each for each in seen if each.step]
    report.check("no switch inside a loop goes unmarked", {each.reason for each in left} <= MARKED, left[:3])
    report.check("no more switches than failures", len(left) <= num_failed, (len(left), num_failed))
    report.check("inside a loop nothing is decided", {each.reason for each in inside} <= MARKED | {"locked"})
    strays = [each for each in seen if not _is_told(each, rows)]
    report.check("the log says the same", not strays, strays[:3])
    torn = [agent.name for agent in agents if len({each.affinity for each in agent.seen}) != 1]
    report.check("a conversation has one affinity", not torn, torn[:3])
    reasons = Counter(each.reason for each in seen)
    report.figures |= {
        "turns": sum(agent.num_turns for agent in agents),
        "requests": len(seen),
        "inside_a_loop": len(inside),
        "failures_injected": num_failed,
        "switches_inside_a_loop": len(left),
        "unmarked": sum(each.reason not in MARKED for each in left),
        "reasons": dict(reasons),
        "tiers": dict(Counter(each.tier for each in seen)),
    }
    report.rows += [(name, str(value)) for name, value in report.figures.items()]


def _is_told(seen: StepSeen, rows: dict[str, RequestRecord]) -> bool:
    """Whether a step's row agrees: with its client, with its turn's decision, and in its propensity."""
    row = rows.get(seen.request_id)
    if row is None or (row.final_tier, row.turn, row.step) != (seen.tier, seen.turn, seen.step):
        return False
    if row.turn_id is None:
        return True
    decided = rows[row.turn_id]
    return (decided.turn_id, decided.final_tier, row.propensity) == (None, row.final_tier, 1.0)


@asynccontextmanager
async def two_servers(
    folder: Path, database_url: str, redis_url: str, model: AgentModel
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Two servers in this process, each with HTTP, memory and models of its own."""
    async with AsyncExitStack() as stack:
        found = []
        for place in (1, 2):
            home = folder / str(place)
            home.mkdir()
            settings = make_settings(home, TOML, database__url=database_url, redis__url=redis_url)
            models = {name: EchoBackend(name, model) for name in ("small", "large")}
            found.append(
                await stack.enter_async_context(running(settings, models, router=FixedRouter(1, 1.0), seed=place))
            )
        yield found[0], found[1]


async def drill(report: Report, num_turns: int, num_agents: int, failing: float, database: str, redis: str) -> None:
    """Play and judge."""
    model = AgentModel(failing, report.seed)
    with tempfile.TemporaryDirectory(prefix="suffice-drill-") as folder:
        async with two_servers(Path(folder), database, redis, model) as servers:
            begun_s = time.perf_counter()
            agents = await play(servers, num_turns, num_agents, report.seed)
            report.figures["seconds"] = round(time.perf_counter() - begun_s, 1)
            judge(report, agents, await rows_of(servers[0]), model.num_failed)


async def _with_own_services(report: Report, given: argparse.Namespace) -> None:
    options = (given.turns, given.agents, given.failing)
    if given.database_url and given.redis_url:
        await drill(report, *options, given.database_url, given.redis_url)
        return
    with tempfile.TemporaryDirectory(prefix="suffice-drill-") as folder:
        cluster, redis = await asyncio.to_thread(PrivatePostgres, free_port()), RedisProcess(free_port(), Path(folder))
        try:
            await asyncio.to_thread(cluster.start)
            await redis.start()
            await drill(report, *options, cluster.url, redis.url)
        finally:
            await redis.stop()
            await asyncio.to_thread(cluster.remove)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.conversations", description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--agents", type=int, default=16, help="agents at work at a time")
    parser.add_argument("--failing", type=float, default=0.01, help="share of calls to a tier that fail")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database-url")
    parser.add_argument("--redis-url")
    given = parser.parse_args(arguments)
    report = Report("conversations", given.seed)
    asyncio.run(_with_own_services(report, given))
    return report.end(("what", "found"))


if __name__ == "__main__":
    sys.exit(main())
