"""The search of ``suffice bench kills``: silent about sound rollouts, loud about every way to be half made."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.bench.kills_search import search
from gateway.control.control_state import Canary, ControlState
from gateway.control.control_writer import ControlWriter
from gateway.ids import uuid7
from gateway.store.control import ControlStore
from gateway.store.control_records import AuditEntry
from gateway.store.store import Store
from tests.gateway.control.ladder import make_router

SOUND = {"half_begun": [], "begun_less_told": 0, "out_of_order": []}


async def roll_out(store: Store, tmp_path: Path) -> Canary:
    """One rollout brought to its end and one under way, as an administrator and the leader would."""
    control = ControlStore(store)
    writer = ControlWriter(control)

    def told(_: ControlState) -> AuditEntry:
        now = datetime.now(UTC)
        return AuditEntry(audit_id=uuid7(), created_at=now, action="shadow_router", subject="r", status=202)

    for name in ("first", "second"):
        router, content = make_router(tmp_path, name)
        await writer.routers.add(router, content, by="anonymous")
        rollout_id = await writer.routers.start_rollout(router.version, by="anonymous", audit=told)
        canary = Canary(router.version, 0.1, "partial", rollout_id)
        await writer.routers.move_rollout(canary, {}, "", by="rollout")
        if name == "first":
            await writer.routers.move_rollout(replace(canary, stage="complete", share=1.0), {}, "", by="rollout")
    return canary


async def test_sound_rollouts_are_found_sound(store: Store, database_url: str, tmp_path: Path) -> None:
    await roll_out(store, tmp_path)
    found = await search(database_url, [])
    assert found["rollouts"] == {"begun": 2, "ended": {"complete": 1}, "steps": 5} | SOUND
    routers = found["routers"]
    assert (routers["unreadable"], routers["half_promoted"], routers["half_serving"]) == ([], [], [])


@pytest.mark.parametrize(
    ("damage", "loud"),
    [
        ("UPDATE rollouts SET status = 'complete' WHERE status = 'running'", ("half_begun", "out_of_order")),
        ("UPDATE router_versions SET status = 'candidate' WHERE status = 'canary'", ("half_promoted",)),
        ("UPDATE router_versions SET status = 'retired' WHERE status = 'serving'", ("half_serving",)),
        ("UPDATE rollouts SET ended_at = NULL", ("out_of_order",)),
        ('UPDATE rollouts SET history = \'[{"stage": "partial", "share": 0.1, "by": "x"}]\'', ("out_of_order",)),
        ("DELETE FROM admin_audit", ("begun_less_told",)),
    ],
)
async def test_what_is_half_made_is_found(
    store: Store, database_url: str, tmp_path: Path, damage: str, loud: tuple[str, ...]
) -> None:
    await roll_out(store, tmp_path)
    async with store.transaction() as connection:
        await connection.exec_driver_sql(damage)
    found = await search(database_url, [])
    said: dict[str, Any] = found["routers"] | found["rollouts"]
    for name in loud:
        assert said[name], name
