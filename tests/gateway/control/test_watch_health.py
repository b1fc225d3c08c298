"""A watch that cannot look, reads late, or meets a clock that was set back, says so and goes on."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from gateway.control import quality_monitor
from gateway.control.metrics import ControlMetrics
from gateway.control.watch_health import WatchHealth
from gateway.ids import first_at, time_of, uuid7
from gateway.store.errors import StoreUnavailable
from tests.gateway.control.checks import Check, put_checks
from tests.gateway.control.test_monitor import default, watched
from tests.gateway.harness import Gateway

EARLIER = timedelta(minutes=1)


def figures(gateway: Gateway, health: WatchHealth) -> dict[str, float]:
    families = ControlMetrics(gateway.parts.control, health).collect()
    return {family.name: family.samples[0].value for family in families if "monitor" in family.name}


@pytest.mark.db
async def test_a_watch_that_cannot_look_raises_an_alert_until_it_can(tmp_path: Path, postgres_url: str) -> None:
    """Reports that took too long failed the look in silence (security review M15)."""
    async with watched(tmp_path, postgres_url, database__report_timeout_s=0.2) as (gateway, lease):
        parts = gateway.parts
        health = WatchHealth(parts.control, parts.monitor)
        await put_checks(parts.store, [Check(0.9) for _ in range(3)], policy=default(gateway))
        blocker = await asyncpg.connect(postgres_url)
        try:
            async with blocker.transaction():
                await blocker.execute("LOCK TABLE usage_days IN ACCESS EXCLUSIVE MODE")
                for _ in range(3):
                    with pytest.raises(StoreUnavailable):
                        await health.look(lease)
        finally:
            await blocker.close()
        store = parts.control.store
        (alert,) = await store.list_alerts(only_open=True)
        assert (alert.kind, alert.subject, health.num_failed) == ("monitor", "look", 3)
        assert figures(gateway, health)["suffice_monitor_failures"] == 3
        # Another process leads afterwards: it closes what this one has raised.
        health = WatchHealth(parts.control, parts.monitor)
        await health.look(lease)
        assert "monitor" not in [each.kind for each in await store.list_alerts(only_open=True)]
        assert figures(gateway, health)["suffice_monitor_failures"] == 0


async def test_the_tenants_watch_catches_up_and_says_when_it_cannot(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 decisions a look were too few for a busy log, for good and in silence (security review, suspected)."""
    monkeypatch.setattr(quality_monitor, "_MAX_NEW", 5)
    monkeypatch.setattr(quality_monitor, "_MAX_BATCHES", 3)
    monkeypatch.setattr(quality_monitor, "_SETTLED", timedelta(0))
    async with watched(tmp_path, database_url) as (gateway, lease):
        parts, policy = gateway.parts, default(gateway)
        health = WatchHealth(parts.control, parts.monitor)
        at = datetime.now(UTC) - EARLIER
        await put_checks(parts.store, [Check()], policy=policy, at=at)
        await health.look(lease)
        await put_checks(parts.store, [Check(tenant="busy") for _ in range(22)], policy=policy, at=at)

        async def num_seen() -> int:
            tenants = (await parts.monitor.drift_report())["tenants"]
            return int(tenants["busy"]["num_baseline"])

        monkeypatch.setattr(parts.monitor, "_clock", lambda: datetime.now(UTC) + timedelta(hours=1))
        await health.look(lease)
        assert await num_seen() == 15
        assert figures(gateway, health)["suffice_monitor_behind_seconds"] > 3000
        (alert,) = await parts.control.store.list_alerts(only_open=True)
        assert (alert.kind, alert.subject) == ("monitor", "tenants")
        await health.look(lease)
        assert await num_seen() == 22
        assert figures(gateway, health)["suffice_monitor_behind_seconds"] == 0
        assert await parts.control.store.list_alerts(only_open=True) == []


async def test_decisions_are_seen_after_the_clock_was_set_back(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ids sort before the place then, and none was seen until the clock was there again (suspected)."""
    monkeypatch.setattr(quality_monitor, "_SETTLED", timedelta(0))
    async with watched(tmp_path, database_url) as (gateway, lease):
        parts, policy = gateway.parts, default(gateway)
        monitor = parts.monitor
        state = await monitor._load()
        ahead = uuid7(time_ns=lambda: int((datetime.now(UTC) + timedelta(days=1)).timestamp() * 1e9))
        await monitor._save(replace(state, last_request=ahead), lease)
        await monitor.look(lease)
        await put_checks(parts.store, [Check(tenant="new")], policy=policy, at=datetime.now(UTC) - EARLIER)
        await monitor.look(lease)
        assert (await monitor.drift_report())["tenants"]["new"]["num_baseline"] == 1


def test_ids_tell_their_time() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    made = uuid7(time_ns=lambda: int(moment.timestamp() * 1000) * 1_000_000)
    assert time_of(made) == moment
    assert first_at(moment) < made < first_at(moment + timedelta(milliseconds=1))
