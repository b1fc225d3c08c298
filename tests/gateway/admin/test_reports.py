"""Reports, checks and alerts over HTTP."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import update

from gateway.ids import uuid7
from gateway.store.control_records import Alert
from gateway.store.tables import verifications
from tests.gateway.admin.kit import Admin, administered
from tests.gateway.admin.test_log import check, put, record


async def raise_alert(admin: Admin, subject: str = "one") -> str:
    """An open alert; returns its id."""
    alert = Alert(
        alert_id=uuid7(), created_at=datetime.now(UTC), kind="drift", severity="warning", subject=subject, body={}
    )
    await admin.gateway.parts.control.store.raise_alert(alert)
    return alert.alert_id


async def test_checks_are_listed_and_filtered(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        rows = [record() for _ in range(3)]
        await put(admin, *rows)
        for row, p_good in zip(rows, (0.9, 0.1, 0.8), strict=True):
            await check(admin, row.request_id, p_good, 0.05)
        page = await admin.get("/verifications?verdict=1&limit=1")
        assert page["data"][0]["request_id"] == rows[2].request_id
        rest = await admin.get(f"/verifications?verdict=1&cursor={page['next']}")
        assert ([each["request_id"] for each in rest["data"]], rest["next"]) == ([rows[0].request_id], None)
        assert (await admin.get("/verifications?status=queued"))["data"] == []
        for report in ("floor", "drift"):
            assert isinstance(await admin.get(f"/reports/{report}"), dict)
        await admin.error("GET", "/evaluations/none", 404, "not_found")


async def test_the_cost_of_checking_stands_against_that_of_serving(tmp_path: Path, database_url: str) -> None:
    checking = {"verification__enabled": True, "verification__worker": False}
    async with administered(tmp_path, database__url=database_url, **checking) as admin:
        assert (await admin.get("/reports/verification"))["share"] is None, "nothing was served"
        priced = record(cost_usd=Decimal("0.004"), created_at=datetime(2026, 1, 1, tzinfo=UTC))
        measured = record(cost_usd=Decimal(5), measured_cost_usd=Decimal("0.006"))
        await put(admin, priced, measured)
        await check(admin, measured.request_id, 0.9, 0.05)
        async with admin.gateway.parts.store.transaction() as connection:
            await connection.execute(update(verifications).values(cost_nano_usd=300_000))
        found = await admin.get("/reports/verification")
        assert (found["serving_cost_usd"], found["verification_cost_usd"]) == ("0.01", "0.0003")
        assert found["share"] == pytest.approx(0.03)
        assert found["max_share"] == admin.gateway.settings.verification.max_cost_share
        assert found["checks"] == {"done": 1}
        late = await admin.get("/reports/verification?since=2026-02-01T00:00:00Z")
        assert late["share"] == pytest.approx(0.05)
        early = await admin.get("/reports/verification?until=2026-02-01T00:00:00Z")
        assert (early["share"], early["checks"]) == (0.0, {})
        worker = admin.gateway.parts.verifier
        await worker.look()
        shares = re.findall(r"^suffice_verification_cost_share (.+)$", (await metrics(admin)), re.MULTILINE)
        assert [float(each) for each in shares] == [pytest.approx(0.05)]


async def metrics(admin: Admin) -> str:
    return (await admin.gateway.client.get("/metrics")).text


async def test_an_alert_is_resolved_once(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        for subject in ("one", "two"):
            await raise_alert(admin, subject)
        found = (await admin.get("/alerts?open=true&kind=drift"))["data"]
        assert [each["subject"] for each in found] == ["two", "one"]
        resolved = (await admin("POST", f"/alerts/{found[0]['id']}/resolve")).json()
        assert resolved["resolved_at"] is not None
        await admin.error("POST", f"/alerts/{found[0]['id']}/resolve", 409, "conflict")
        await admin.error("POST", "/alerts/none/resolve", 404, "not_found")
        assert [each["subject"] for each in (await admin.get("/alerts?open=true"))["data"]] == ["one"]
        assert len((await admin.get("/alerts"))["data"]) == 2


async def test_what_is_in_force_is_shown(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        tiers = (await admin.get("/tiers"))["data"]
        assert [(each["tier"], each["model"], each["price_per_request_usd"]) for each in tiers] == [
            (1, "small", "0.0001"),
            (2, "large", "0.01"),
        ]
        before = await admin.get("/control")
        switched = await admin("PUT", "/kill-switch", json={"on": True, "reason": "look"})
        assert switched.json() == {"on": True, "reason": "look"}
        assert (await admin.gateway.chat("hi")).headers["x-suffice-reason"] == "kill_switch"
        again = {"json": {"on": False}, "headers": {"if-match": switched.headers["etag"]}}
        assert not (await admin("PUT", "/kill-switch", **again)).json()["on"]
        after = await admin.get("/control")
        assert after["state"]["generation"] > before["state"]["generation"]
        assert after["server"]["generation"] == after["state"]["generation"]
