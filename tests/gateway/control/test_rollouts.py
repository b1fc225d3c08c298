"""A new router's way to traffic: what moves it on, what ends it, and that it is judged by what tells of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from gateway.control.errors import Conflict
from gateway.control.rollout_driver import RolloutDriver, RolloutState
from gateway.store.control_records import RouterVersion, ShadowDecision
from gateway.store.monitoring import MonitorReader
from gateway.store.tables import shadow_decisions, verifications
from tests.gateway.control.checks import Check, put_checks
from tests.gateway.control.ladder import make_router, serving
from tests.gateway.harness import Gateway


async def test_a_router_in_shadow_is_compared_without_serving(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, database_url, control__shadow_share=1.0, policy__exploration_share=0) as gateway:
        control = gateway.parts.control
        router, content = make_router(tmp_path, "shadow")
        await control.writer.routers.add(router, content, by="retrain")
        since = datetime.now(UTC)
        await control.writer.routers.start_rollout(router.version, by="retrain")
        for n in range(12):
            answer = await gateway.chat(f"What is {n} + {n}?")
            assert answer.headers["x-suffice-router-version"] != router.version
        await gateway.chat("pinned", model="one")
        await control.shadow.settle()
        counts = await control.store.count_shadow_decisions(router.version, since)
        assert counts == (12, 12, 0), "the same estimates lead to the same tiers; pinned requests are left out"


def driver_of(gateway: Gateway) -> RolloutDriver:
    parts = gateway.parts
    return RolloutDriver(parts.control, MonitorReader(parts.store), gateway.settings.control, gateway.settings.monitor)


QUICK = {
    "control__rollout_min_stage_s": 0,
    "control__rollout_min_shadow_decisions": 0,
    "control__rollout_min_checked": 20,
}


async def started(gateway: Gateway, tmp_path: Path) -> tuple[Any, str]:
    control = gateway.parts.control
    router, content = make_router(tmp_path, "new")
    await control.writer.routers.add(router, content, by="retrain")
    await control.writer.routers.start_rollout(router.version, by="retrain", reason="judged better")
    return control, router.version


async def test_a_good_router_comes_to_serve_everything(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, database_url, **QUICK) as gateway:
        control, version = await started(gateway, tmp_path)
        policy, seen = control.policies["default"], []
        for _ in range(12):
            # A driver that knows nothing but the database, as after a change of leaders.
            await driver_of(gateway).step(control.leader.lease)
            canary = control.state.router.canary
            seen.append((canary.stage, canary.share) if canary else ("complete", 1.0))
            if canary is None:
                break
            checks = [Check(0.97, p_as_good=0.9) for _ in range(22)]
            await put_checks(
                gateway.parts.store, checks, policy=(policy.name, policy.version), router_version=version, top=4
            )
        assert seen == [("partial", 0.1), ("partial", 0.5), ("partial", 1.0), ("complete", 1.0)]
        assert (control.state.router.active, control.routers.version) == (version, version)
        assert (await gateway.chat()).headers["x-suffice-router-version"] == version
        (row,) = await control.store.list_rollouts()
        assert row.status == "complete"
        assert [each["stage"] for each in row.history] == ["shadow", "partial", "partial", "partial", "complete"]
        stored = await control.store.get_router(version)
        assert stored is not None
        assert stored.status == "serving"


async def test_a_harmful_router_is_rolled_back_by_itself(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, database_url, **QUICK) as gateway:
        control, version = await started(gateway, tmp_path)
        before = control.routers.version
        driver, policy = driver_of(gateway), control.policies["default"]
        await driver.step(control.leader.lease)
        assert control.state.router.canary.share == 0.1
        checks = [Check(0.1) for _ in range(60)]
        await put_checks(
            gateway.parts.store, checks, policy=(policy.name, policy.version), router_version=version, top=4
        )
        await driver.step(control.leader.lease)
        assert (control.state.router.canary, control.routers.version) == (None, before)
        (row,) = await control.store.list_rollouts()
        assert row.status == "rolled_back"
        assert "guard" in row.reason
        assert RolloutState.from_dict(row.state).rollout.guard.is_alarmed
        assert [each.kind for each in await control.store.list_alerts(only_open=True)] == ["rollout"]
        await driver.step(control.leader.lease)


async def test_checks_of_the_serving_router_do_not_move_a_rollout(tmp_path: Path, sqlite_url: str) -> None:
    async with serving(tmp_path, sqlite_url, **QUICK) as gateway:
        control, _ = await started(gateway, tmp_path)
        driver, policy = driver_of(gateway), control.policies["default"]
        await driver.step(control.leader.lease)
        checks = [Check(0.1) for _ in range(60)]
        await put_checks(
            gateway.parts.store,
            checks,
            policy=(policy.name, policy.version),
            router_version=control.routers.version,
            top=4,
        )
        await driver.step(control.leader.lease)
        assert control.state.router.canary.share == 0.1


async def test_a_rollout_of_what_cannot_be_loaded_ends(tmp_path: Path, sqlite_url: str) -> None:
    async with serving(tmp_path, sqlite_url) as gateway:
        control = gateway.parts.control
        await control.writer.routers.add(
            RouterVersion(version="broken", created_at=datetime.now(UTC)), b"torn", by="ada"
        )
        await control.writer.routers.start_rollout("broken", by="ada")
        await driver_of(gateway).step(control.leader.lease)
        assert control.state.router.canary is None
        (row,) = await control.store.list_rollouts()
        assert (row.status, row.reason) == ("rolled_back", "It cannot be loaded.")
        with pytest.raises(Conflict):
            await control.writer.routers.roll_back(by="ada")


async def put_beside(gateway: Gateway, version: str, checks: list[Check], *, would_be: int) -> None:
    """Checks of requests that the serving router decided, and that a router on its way had sent to ``would_be``."""
    control, store = gateway.parts.control, gateway.parts.store
    policy = control.policies["default"]
    async with store.transaction() as connection:
        known = {row.request_id for row in await connection.execute(select(verifications.c.request_id))}
    decided = (policy.name, policy.version)
    await put_checks(store, checks, policy=decided, router_version=control.routers.version, top=4)
    async with store.transaction() as connection:
        found = await connection.execute(select(verifications.c.request_id, verifications.c.tier))
        new = [(row.request_id, row.tier) for row in found if row.request_id not in known]
    now = datetime.now(UTC)
    await control.store.add_shadow_decisions(
        [
            ShadowDecision(
                request_id=request_id,
                router_version=version,
                created_at=now,
                policy_name=policy.name,
                tier=tier,
                shadow_tier=would_be,
                sufficiency=(),
                novelty=0.0,
            )
            for request_id, tier in new
        ]
    )


def beside(p_good: float, num: int, tier: int = 4) -> list[Check]:
    """Requests that doubt had moved up to a tier, with the next lower one asked beside it."""
    return [Check(p_good, tier=tier, direction="down", inclusion=0.2, reason="tightened") for _ in range(num)]


async def test_a_stage_passes_by_checks_asked_beside_the_top_tier(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, database_url, **QUICK) as gateway:
        control, version = await started(gateway, tmp_path)
        await driver_of(gateway).step(control.leader.lease)
        await put_beside(gateway, version, beside(0.97, 30), would_be=2)
        await put_beside(gateway, version, beside(0.97, 30, tier=3), would_be=2)
        await driver_of(gateway).step(control.leader.lease)
        assert control.state.router.canary.share == 0.1, "of another tier, and beside a tier that is not the top"
        await put_beside(gateway, version, beside(0.97, 30), would_be=3)
        await driver_of(gateway).step(control.leader.lease)
        assert control.state.router.canary.share == 0.5
        (row,) = await control.store.list_rollouts()
        assert RolloutState.from_dict(row.state).num_beside == 30


async def test_harm_is_seen_before_a_router_serves_anybody(tmp_path: Path, sqlite_url: str) -> None:
    async with serving(tmp_path, sqlite_url, **QUICK | {"control__rollout_min_shadow_decisions": 1000}) as gateway:
        control, version = await started(gateway, tmp_path)
        driver = driver_of(gateway)
        await driver.step(control.leader.lease)
        assert control.state.router.canary.stage == "shadow"
        await put_beside(gateway, version, beside(0.1, 60), would_be=3)
        await driver.step(control.leader.lease)
        assert control.state.router.canary is None
        (row,) = await control.store.list_rollouts()
        assert [each["stage"] for each in row.history] == ["shadow", "rolled_back"]


async def test_what_is_drawn_is_shown_to_a_router_without_the_doubts_of_another(
    tmp_path: Path, sqlite_url: str
) -> None:
    told = {
        "control__shadow_share": 0.0,
        "policy__exploration_share": 0,
        "policy__quality_floor": 0.5,
        "policy__sampling__doubt_share": 1.0,
    }
    async with serving(tmp_path, sqlite_url, **told) as gateway:
        control = gateway.parts.control
        usual = int((await gateway.chat("What is 2 + 2?")).headers["x-suffice-tier"])
        closed = dict.fromkeys(range(1, 4), 2.0)
        await control.writer.quarantines.add("default", control.routers.version, closed, "doubt", by="test")
        await started(gateway, tmp_path)
        for _ in range(3):
            assert (await gateway.chat("What is 2 + 2?")).headers["x-suffice-reason"] == "tightened"
        await control.shadow.settle()
        async with gateway.parts.store.transaction() as connection:
            rows = [
                tuple(row)
                for row in await connection.execute(select(shadow_decisions.c.tier, shadow_decisions.c.shadow_tier))
            ]
        assert rows == [(4, usual)] * 3
