"""The monitor says what the statistics say, acts on it, and forgets nothing; real rows in both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from gateway.control.control_state import CLOSED
from gateway.control.quality_monitor import QualityMonitor
from gateway.store.control_records import Lease
from gateway.store.monitoring import MonitorReader
from gateway.store.store import Store
from gateway.store.tables import retrain_runs
from policies.certificate import CheckedSample, certify
from policies.intervals import binomial_lower, binomial_upper
from policies.judge_correction import GoldCounts
from tests.gateway.control.checks import Check, put_checks
from tests.gateway.control.waiting import until
from tests.gateway.harness import Gateway, make_settings, running


@asynccontextmanager
async def watched(tmp_path: Path, url: str, **overrides: Any) -> AsyncIterator[tuple[Gateway, Lease]]:
    """A gateway that leads and whose monitor looks when it is told to."""
    given = {"monitor__every_s": 3600, "verification__worker": False, "policy__quality_floor": 0.9} | overrides
    async with running(make_settings(tmp_path, database__url=url, **given)) as gateway:
        control = gateway.parts.control
        await until(lambda: control.leader.lease is not None)
        yield gateway, control.leader.lease


def default(gateway: Gateway) -> tuple[str, str]:
    policy = gateway.parts.control.policies["default"]
    return policy.name, policy.version


async def floor_of(gateway: Gateway, name: str = "default") -> dict[str, Any]:
    report = await gateway.parts.monitor.floor_report()
    found: dict[str, Any] = next(each for each in report["policies"] if each["policy"] == name)
    return found


async def test_a_grade_beyond_its_range_counts_as_the_nearest_within(store: Store) -> None:
    """What a certificate takes for a loss is from 0 to 1, whatever a column holds."""
    at = datetime.now(UTC)
    await put_checks(store, [Check(each) for each in (-0.25, 0.25, 1.25)], policy=("p", "v"), at=at)
    losses = [row.loss async for row in MonitorReader(store).checked(finished_since=at, limit=9)]
    assert losses == [1.0, 0.75, 0.0]


async def alerts(gateway: Gateway) -> list[str]:
    return [each.kind for each in await gateway.parts.control.store.list_alerts(only_open=True)]


async def retrains(gateway: Gateway) -> list[Any]:
    async with gateway.parts.store.transaction() as connection:
        ordered = select(retrain_runs).order_by(retrain_runs.c.run_id)
        return list((await connection.execute(ordered)).mappings())


async def test_the_certificate_is_the_statistics_own(tmp_path: Path, database_url: str) -> None:
    async with watched(tmp_path, database_url) as (gateway, _):
        drawn = [Check(0.05 if n % 25 == 0 else 0.98, inclusion=0.5) for n in range(150)]
        others = [Check(inclusion=0.5) for _ in range(150)]
        top = [Check(tier=2, inclusion=0.01) for _ in range(40)]
        await put_checks(gateway.parts.store, [*drawn, *others, *top], policy=default(gateway))
        found = await floor_of(gateway)
        losses = np.array([1 - each.p_good for each in drawn if each.p_good is not None])
        expected = certify(CheckedSample(losses, np.full(150, 0.5), 340, 0.5), 0.9, 0.95)
        assert found["status"] == expected.status.value
        assert found["loss"] == pytest.approx(expected.loss)
        assert found["loss_high"] == pytest.approx(expected.loss_high)
        assert (found["num_checked"], found["num_requests"]) == (150, 340)
        (tier,) = found["tiers"]
        alone = certify(CheckedSample(losses, np.full(150, 0.5), 300, 0.5), 0.9, 0.95)
        assert tier["loss_high"] == pytest.approx(alone.loss_high)
        raw = found["raw_upgrade_rate"]
        flagged = sum(each.p_good is not None and each.p_good < 0.5 for each in drawn[-100:])
        assert raw["value"] == flagged / 100
        assert (raw["low"], raw["high"]) == (binomial_lower(flagged, 100, 0.975), binomial_upper(flagged, 100, 0.975))


@pytest.mark.parametrize(
    ("rate", "num", "status"), [(0.0, 200, "held"), (0.5, 200, "broken"), (0.0, 5, "insufficient")]
)
async def test_a_floor_is_held_broken_or_open(
    tmp_path: Path, sqlite_url: str, rate: float, num: int, status: str
) -> None:
    async with watched(tmp_path, sqlite_url) as (gateway, _):
        await put_checks(
            gateway.parts.store, [Check(0.0 if n < rate * num else 1.0) for n in range(num)], policy=default(gateway)
        )
        assert (await floor_of(gateway))["status"] == status


async def test_an_erring_grader_is_corrected_by_gold(tmp_path: Path, sqlite_url: str) -> None:
    """A grader that flags one in ten sound answers reads a floor of 0.9 as open; the gold set knows better."""
    async with watched(tmp_path, sqlite_url, monitor__min_gold=50) as (gateway, _):
        store, policy = gateway.parts.store, default(gateway)
        sound = [Check(0.1 if n % 10 == 0 else 0.9, gold=1.0) for n in range(300)]
        faults = [Check(0.1, gold=0.0) for _ in range(80)]
        await put_checks(store, [*sound, *faults], policy=("other", "v"))
        await put_checks(store, [Check(0.1 if n % 10 == 0 else 0.9) for n in range(600)], policy=policy)
        found = await floor_of(gateway)
        gold = GoldCounts(80, 80, 30, 300)
        flags = np.array([float(n % 10 == 0) for n in range(600)])
        expected = certify(CheckedSample(flags, np.ones(600), 600, 1.0), 0.9, 0.95, gold)
        assert found["is_corrected_by_gold"]
        assert found["status"] == expected.status.value == "held"
        assert found["loss_high"] == pytest.approx(expected.loss_high)


async def test_unfinished_checks_weigh_their_likes_up(tmp_path: Path, sqlite_url: str) -> None:
    async with watched(tmp_path, sqlite_url) as (gateway, _):
        store, policy = gateway.parts.store, default(gateway)
        await put_checks(store, [Check(0.0 if n < 5 else 1.0, inclusion=0.5) for n in range(50)], policy=policy)
        assert (await floor_of(gateway))["loss"] == pytest.approx(5 / 0.5 / 50)
        await gateway.parts.control.store.store.record(*_queued(policy))
        assert (await floor_of(gateway))["loss"] == pytest.approx(5 / (0.5 * 50 / 51) / 51)


def _queued(policy: tuple[str, str]) -> tuple[Any, Any]:
    from gateway.ids import uuid7
    from gateway.store.records import VerificationJob
    from tests.gateway.records import make_record

    now = datetime.now(UTC)
    names: dict[str, Any] = {"policy_name": policy[0], "policy_version": policy[1], "router_version": "none"}
    record = make_record(created_at=now, final_tier=1, verify_probability=0.5, **names)
    job = VerificationJob(
        verification_id=uuid7(),
        request_id=record.request_id,
        created_at=now,
        direction="up",
        tier=1,
        against_tier=2,
        inclusion_probability=0.5,
        stratum="",
        prompt="{}",
        answer="",
        **names,
    )
    return record, job


async def test_a_broken_floor_moves_traffic_up(tmp_path: Path, database_url: str) -> None:
    async with watched(tmp_path, database_url) as (gateway, lease):
        await put_checks(gateway.parts.store, [Check(0.3) for _ in range(80)], policy=default(gateway))
        await gateway.parts.monitor.look(lease, at_once=True)
        control = gateway.parts.control
        (asked,) = control.state.quarantine("default", None).items()
        assert (asked[0], asked[1].least) == (1, CLOSED)
        assert "floor" in await alerts(gateway)
        (run,) = await retrains(gateway)
        assert (run["trigger"], run["status"]) == ("drift", "requested")
        generation = control.state.generation
        await gateway.parts.monitor.look(lease, at_once=True)
        assert control.state.generation == generation, "said once"


async def test_while_in_doubt_a_retrain_is_asked_for_again(tmp_path: Path, database_url: str) -> None:
    async with watched(tmp_path, database_url) as (gateway, lease):
        store, monitor = gateway.parts.store, gateway.parts.monitor
        at = datetime.now(UTC) - timedelta(minutes=10)
        await put_checks(store, [Check(0.3) for _ in range(80)], policy=default(gateway), at=at)
        await monitor.look(lease, at_once=True)
        assert len(await retrains(gateway)) == 1
        async with store.transaction() as connection:
            await connection.execute(update(retrain_runs).values(status="kept", finished_at=at + timedelta(minutes=5)))
        await monitor.look(lease, at_once=True)
        assert len(await retrains(gateway)) == 1, "nothing was checked since"
        await put_checks(store, [Check(0.3) for _ in range(100)], policy=default(gateway), at=at + timedelta(minutes=6))
        await monitor.look(lease, at_once=True)
        assert len(await retrains(gateway)) == 1, "of requests from before the doubt"
        await put_checks(store, [Check(0.3) for _ in range(100)], policy=default(gateway))
        await monitor.look(lease, at_once=True)
        assert [run["status"] for run in await retrains(gateway)] == ["kept", "requested"]
        await monitor.look(lease, at_once=True)
        assert len(await retrains(gateway)) == 2


async def test_without_acting_it_only_reports(tmp_path: Path, sqlite_url: str) -> None:
    async with watched(tmp_path, sqlite_url, monitor__act=False) as (gateway, lease):
        await put_checks(gateway.parts.store, [Check(0.3) for _ in range(80)], policy=default(gateway))
        await gateway.parts.monitor.look(lease, at_once=True)
        assert gateway.parts.control.state.quarantines == {}
        assert await retrains(gateway) == []
        assert "floor" in await alerts(gateway)


async def test_only_the_lower_estimates_are_given_up_where_the_rest_is_certified(
    tmp_path: Path, sqlite_url: str
) -> None:
    async with watched(tmp_path, sqlite_url) as (gateway, lease):
        checks = [Check(1.0, p_as_good=0.97) for _ in range(150)] + [Check(0.0, p_as_good=0.91) for _ in range(60)]
        await put_checks(gateway.parts.store, checks, policy=default(gateway))
        await gateway.parts.monitor.look(lease, at_once=True)
        (asked,) = gateway.parts.control.state.quarantine("default", None).values()
        assert 0.91 < asked.least <= 0.97


async def test_evidence_releases_what_doubt_has_closed(tmp_path: Path, sqlite_url: str) -> None:
    async with watched(tmp_path, sqlite_url) as (gateway, lease):
        control, store = gateway.parts.control, gateway.parts.store
        await control.writer.quarantines.add("default", None, {1: CLOSED}, "doubt", by="monitor", lease=lease)
        down = [
            Check(1.0, tier=2, direction="down", p_as_good=0.95, inclusion=0.1, reason="tightened") for _ in range(60)
        ]
        # Asked at another rate about requests that no doubt had moved: none of the tier's own, and no evidence.
        other = [Check(0.0, tier=2, direction="down", p_as_good=0.95, inclusion=0.01) for _ in range(5)]
        await put_checks(store, down[:20] + other, policy=default(gateway))
        await gateway.parts.monitor.look(lease, at_once=True)
        assert control.state.quarantine("default", None)[1].least == CLOSED, "too little is known"
        await put_checks(store, down, policy=default(gateway))
        await gateway.parts.monitor.look(lease, at_once=True)
        assert control.state.quarantine("default", None) == {}


async def test_drift_is_found_once_tightens_and_survives_a_restart(tmp_path: Path, database_url: str) -> None:
    async with watched(tmp_path, database_url) as (gateway, lease):
        parts, store = gateway.parts, gateway.parts.store
        at = datetime.now(UTC) - timedelta(minutes=10)
        good = [Check(0.0 if n % 15 == 0 else 1.0, domain="math") for n in range(150)]
        await put_checks(store, good, policy=default(gateway), at=at)
        await parts.monitor.look(lease, at_once=True)
        assert "drift" not in await alerts(gateway)
        half = [Check(0.0 if n % 2 else 1.0, domain="math") for n in range(60)]
        await put_checks(store, half[:20], policy=default(gateway), at=at + timedelta(minutes=5))
        await parts.monitor.look(lease, at_once=True)
        before = (await parts.monitor.drift_report())["views"]
        # Another leader's monitor, which knows nothing but the database.
        other = QualityMonitor(parts.control, MonitorReader(store), gateway.settings.monitor)
        await other.look(lease, at_once=True)
        assert (await other.drift_report())["views"] == before, "nothing is counted twice, nothing forgotten"
        await put_checks(store, half, policy=default(gateway), at=at + timedelta(minutes=8))
        await other.look(lease, at_once=True)
        report = {view["family"]: view for view in (await other.drift_report())["views"]}
        assert report["policy"]["is_alarmed"]
        assert 150 < report["policy"]["alarmed_at"] <= 230
        assert report["policy"]["num_checked"] == report["domain"]["num_checked"] == 230
        assert parts.control.state.quarantine("default", None)[1].least == CLOSED
        assert len(await retrains(gateway)) == 1
        stated = sum(view["false_alarm"] for view in report.values())
        assert stated <= gateway.settings.monitor.false_alarm


async def test_a_resolved_alarm_begins_anew(tmp_path: Path, sqlite_url: str) -> None:
    async with watched(tmp_path, sqlite_url) as (gateway, lease):
        parts = gateway.parts
        await put_checks(parts.store, [Check(0.0) for _ in range(60)], policy=default(gateway))
        await parts.monitor.look(lease, at_once=True)
        (view,) = [each for each in (await parts.monitor.drift_report())["views"] if each["family"] == "policy"]
        assert view["is_alarmed"]
        for each in await parts.control.store.list_alerts(only_open=True):
            await parts.control.store.resolve_alerts(each.kind, each.subject, datetime.now(UTC))
        await parts.monitor.look(lease, at_once=True)
        (view,) = [each for each in (await parts.monitor.drift_report())["views"] if each["family"] == "policy"]
        assert (view["is_alarmed"], view["num_checked"]) == (False, 0)


async def test_denser_strata_do_not_look_like_drift(tmp_path: Path, sqlite_url: str) -> None:
    """Unsure answers fail more and are drawn four times as often; the rate over all answers is in order."""
    async with watched(tmp_path, sqlite_url) as (gateway, lease):
        checks = []
        for n in range(400):
            is_dense = n % 5 < 4  # four of five drawn answers come from a tenth of the traffic
            checks.append(Check(0.0 if is_dense and n % 4 == 0 else 1.0, inclusion=0.4 if is_dense else 0.01))
        await put_checks(gateway.parts.store, checks, policy=default(gateway))
        await gateway.parts.monitor.look(lease, at_once=True)
        (view,) = [v for v in (await gateway.parts.monitor.drift_report())["views"] if v["family"] == "policy"]
        assert not view["is_alarmed"]
        assert view["num_checked"] == 400


async def test_a_tenant_whose_traffic_jumps_up_raises_an_alert(tmp_path: Path, database_url: str) -> None:
    async with watched(tmp_path, database_url, monitor__tenant_baseline=60) as (gateway, lease):
        parts, policy = gateway.parts, default(gateway)
        await put_checks(parts.store, [Check()], policy=policy, at=datetime.now(UTC) - timedelta(minutes=9))
        await parts.monitor.look(lease, at_once=True)
        usual = [Check(tier=2 if n % 20 == 0 else 1, tenant=name) for n in range(80) for name in ("calm", "struck")]
        await put_checks(parts.store, usual, policy=policy, at=datetime.now(UTC) - timedelta(minutes=5))
        await parts.monitor.look(lease, at_once=True)
        assert await alerts(gateway) == []
        jump = [Check(tier=2, tenant="struck") for _ in range(60)] + [Check(tenant="calm") for _ in range(60)]
        jump += [Check(tier=2, tenant="calm", reason="pinned") for _ in range(60)]
        await put_checks(parts.store, jump, policy=policy, at=datetime.now(UTC) - timedelta(minutes=1))
        await parts.monitor.look(lease, at_once=True)
        (alert,) = await parts.control.store.list_alerts(only_open=True)
        assert (alert.kind, alert.subject) == ("tenant", "struck")
        tenants = (await parts.monitor.drift_report())["tenants"]
        assert {name: each["is_alarmed"] for name, each in tenants.items()} == {"calm": False, "struck": True}
