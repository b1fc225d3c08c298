"""A process that changes routers is killed at random points: no change is ever half there; on both databases."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.control.control_state import ControlState
from gateway.store.control import ControlStore
from gateway.store.store import Store
from gateway.store.tables import admin_audit, rollouts, router_versions

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, random, sys
from dataclasses import replace
from datetime import UTC, datetime
from gateway.control.control_state import ControlState
from gateway.control.control_writer import ControlWriter
from gateway.ids import uuid7
from gateway.config.store_section import StoreConfig
from gateway.store.control import ControlStore
from gateway.store.control_records import AuditEntry, RouterVersion
from gateway.store.store import Store

async def main(url):
    async with Store(StoreConfig(url=url)) as store:
        writer = ControlWriter(ControlStore(store))
        print("go", flush=True)
        while True:
            version, now = uuid7(), datetime.now(UTC)
            router = RouterVersion(version=version, created_at=now)
            audit = AuditEntry(audit_id=uuid7(), created_at=now, action="add", subject=version)
            await writer.routers.add(router, b"x" * 100_000, by="w", audit=lambda _: audit)
            canary = ControlState.decode(await writer.store.rows()).router.canary
            if canary is None:
                await writer.routers.start_rollout(version, by="w")
                canary = ControlState.decode(await writer.store.rows()).router.canary
            await writer.routers.move_rollout(replace(canary, stage="partial", share=0.1), {}, "", by="w")
            end = random.choice(("complete", "rolled_back"))
            await writer.routers.move_rollout(replace(canary, stage=end, share=0.0), {}, "", by="w")
            print("round", flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
async def test_no_router_is_half_promoted(database_url: str, store: Store) -> None:
    dice = random.Random(7)
    for _ in range(5):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, database_url, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        # Killed within a round, whatever a round takes on this machine: the first ones are timed.
        rounds_s = []
        for _ in range(dice.randint(2, 4)):
            begun_s = time.monotonic()
            assert await child.stdout.readline() in (b"go\n", b"round\n")
            rounds_s.append(time.monotonic() - begun_s)
        await asyncio.sleep(dice.uniform(0.0, rounds_s[-1]))
        child.kill()
        await child.wait()
        await assert_whole(store)
    state = ControlState.decode(await ControlStore(store).rows())
    assert state.generation > 10, "there was something to kill"


async def assert_whole(store: Store) -> None:
    """What is in force, the routers' statuses, the rollouts and the audit say the same."""
    state = ControlState.decode(await ControlStore(store).rows())
    async with store.transaction() as connection:
        statuses = {row.version: row.status for row in await connection.execute(select(router_versions))}
        running = [row for row in await connection.execute(select(rollouts)) if row.status == "running"]
        audited = {row.subject for row in await connection.execute(select(admin_audit))}
    serving = {version for version, status in statuses.items() if status == "serving"}
    assert serving == ({state.router.active} if state.router.active else set())
    canary = state.router.canary
    assert [row.rollout_id for row in running] == ([canary.rollout_id] if canary else [])
    if canary is not None:
        assert (running[0].stage, running[0].share) == (canary.stage, canary.share)
        assert statuses[canary.version] == ("shadow" if canary.stage == "shadow" else "canary")
    assert audited == set(statuses), "a router and its audit entry come together"
