"""No prompt leaves its regions by being checked; a floor that rests on what nobody may check is not certified."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from backends.testing import Script
from gateway.config.settings import Settings
from gateway.control.control_plane import ControlPlane
from gateway.control.floor_findings import FloorEvidence, FloorFinding, find_floor
from gateway.store.monitoring import CheckedRow, Key, MonitorReader, Traffic
from gateway.store.tables import requests, verifications
from policies.certificate import FloorStatus
from policies.policy import Policy
from tests.gateway.harness import Gateway, Watched, make_settings, running
from tests.gateway.records import NOW
from tests.gateway.verify.jobs import draw_jobs
from tests.gateway.verify.test_worker import ALL, read, until_done

LADDER = """
[[tiers]]
name = "low"
model = "low"
region = "eu"
price_per_request_usd = 0.0001

[[tiers]]
name = "mid"
model = "mid"
region = "eu"
price_per_request_usd = 0.001

[[tiers]]
name = "top"
model = "top"
region = "us"
price_per_request_usd = 0.01

[models.low]
kind = "echo"

[models.mid]
kind = "echo"

[models.top]
kind = "echo"
"""

# Everything that would be asked about an answer is: judge and scores included.
CHECK_ALL: Mapping[str, Any] = ALL | {
    "verification__graders": ["final_answer", "overlap", "embedding", "likelihood", "judge"],
    "policy__sampling__down_share": 1.0,
    "policy__exploration_share": 0.0,
}


def backends() -> dict[str, Any]:
    return {name: Watched(name, Script(text="The answer is 5.")) for name in ("low", "mid", "top")}


def settings_of(directory: Path, database_url: str, ladder: str = LADDER, **overrides: Any) -> Settings:
    return make_settings(directory, ladder, database__url=database_url, **(CHECK_ALL | overrides))


async def findings(gateway: Gateway) -> FloorFinding:
    """The floor of the default policy, by what the database holds."""
    plane: ControlPlane = gateway.parts.control
    policy = plane.policies["default"]
    reader = MonitorReader(gateway.parts.store)
    rows = await reader.newest_checked(created_since=NOW, limit=1000)
    evidence = FloorEvidence(rows, await reader.traffic(NOW), await reader.drawn(NOW), None)
    return find_floor(policy, plane.routers.version, policy.top(plane.ladder), evidence, {})


async def test_a_policys_answers_are_checked_within_its_regions(tmp_path: Path, database_url: str) -> None:
    """The highest tier that it permits stands for the top."""
    settings = settings_of(tmp_path, database_url, policy__allowed_regions=["eu"])
    async with running(settings, backends()) as gateway:
        await gateway.chat("What is 2 plus 3?", suffice={"max_tier": 1})
        await gateway.chat("What is 2 plus 3?", suffice={"min_tier": 2})
        rows = await until_done(gateway.parts.store, 2)
        assert sorted((row["direction"], row["tier"], row["against_tier"]) for row in rows) == [
            ("down", 2, 1),
            ("up", 1, 2),
        ]
        assert [row["status"] for row in rows] == ["done", "done"]
        assert [row["regions"] for row in rows] == [["eu"], ["eu"]]
        assert gateway.backends["top"].num_seen == 0
        assert gateway.backends["mid"].num_seen > 1


async def test_a_narrowed_request_is_not_drawn_against_a_top_elsewhere(tmp_path: Path, database_url: str) -> None:
    async with running(settings_of(tmp_path, database_url), backends()) as gateway:
        for _ in range(30):
            response = await gateway.chat("What is 2 plus 3?", suffice={"regions": ["eu"], "max_tier": 1})
            assert response.headers["x-suffice-tier"] == "1"
        assert await read(gateway.parts.store, verifications) == []
        assert {row.verify_probability for row in await gateway.rows()} == {0.0}
        found = await findings(gateway)
        assert (found.status, found.certificate.loss_high) == (FloorStatus.INSUFFICIENT, 1.0)
        assert found.tiers[0].as_dict()["num_undrawable"] == 30
        assert gateway.backends["top"].num_seen == gateway.backends["mid"].num_seen == 0


async def test_a_narrowed_answer_of_the_middle_is_still_asked_downward(tmp_path: Path, database_url: str) -> None:
    """Whether the tier below would have done is asked within the region; against the top nothing is."""
    async with running(settings_of(tmp_path, database_url), backends()) as gateway:
        assert (await gateway.chat(suffice={"regions": ["eu"]})).headers["x-suffice-tier"] == "2"
        (row,) = await until_done(gateway.parts.store)
        assert (row["direction"], row["against_tier"], row["regions"]) == ("down", 1, ["eu"])
        assert (await gateway.row()).verify_probability == 0.0
        assert gateway.backends["top"].num_seen == 0


NOWHERE = LADDER.replace('region = "us"\n', "")


@pytest.mark.parametrize(
    ("ladder", "allowed", "regions"),
    [(LADDER, [], ("eu",)), (NOWHERE, [], ("eu", "us")), (LADDER, ["eu"], None)],
    ids=["drawn for a region", "the tier has moved", "the policy is stricter now"],
)
async def test_a_check_that_may_not_be_asked_any_more_is_given_up(
    tmp_path: Path, database_url: str, ladder: str, allowed: list[str], regions: tuple[str, ...] | None
) -> None:
    settings = settings_of(tmp_path, database_url, ladder, policy__allowed_regions=allowed)
    async with running(settings, backends()) as gateway:
        await draw_jobs(gateway.parts.store, 1, created_at=datetime.now(UTC), against_tier=3, regions=regions)
        (row,) = await until_done(gateway.parts.store)
        assert (row["status"], row["num_attempts"]) == ("failed", 1)
        assert "tier 3 is in" in row["error"]
        assert gateway.backends["top"].num_seen == gateway.backends["low"].num_seen == 0


async def test_what_was_drawn_for_anywhere_is_asked_anywhere(tmp_path: Path, database_url: str) -> None:
    async with running(settings_of(tmp_path, database_url), backends()) as gateway:
        await draw_jobs(gateway.parts.store, 1, created_at=datetime.now(UTC), against_tier=3)
        (row,) = await until_done(gateway.parts.store)
        assert row["status"] == "done"
        assert gateway.backends["top"].num_seen > 0


@pytest.mark.parametrize(("num_undrawable", "status"), [(0, "held"), (5, "held"), (60, "insufficient")])
def test_answers_that_nobody_may_check_count_as_lost(num_undrawable: int, status: str) -> None:
    policy = Policy(quality_floor=0.9)
    key: Key = (policy.name, policy.version, "none", 1)
    rng = np.random.default_rng(0)
    rows = [
        CheckedRow(
            f"v{place}", f"r{place}", NOW, NOW, True, 1, 1.0, "default", "", *key[:3], float(loss), int(1 - loss), 0.9
        )
        for place, loss in enumerate(rng.random(500) < 0.03)
    ]
    evidence = FloorEvidence(rows, {key: Traffic(len(rows), num_undrawable)}, {}, None)
    found = find_floor(policy, "none", 2, evidence, {})
    assert found.status.value == found.certificate.status.value == found.tiers[0].certificate.status.value == status
    assert found.certificate.num_requests == 500 + num_undrawable
    plain = find_floor(policy, "none", 2, FloorEvidence(rows, {key: Traffic(len(rows))}, {}, None), {})
    assert found.certificate.loss_high >= plain.certificate.loss_high
    assert found.certificate.loss == plain.certificate.loss


async def test_the_rows_of_what_was_barred_survive_both_databases(tmp_path: Path, database_url: str) -> None:
    async with running(settings_of(tmp_path, database_url), backends()) as gateway:
        await gateway.chat(suffice={"regions": ["eu"], "max_cost_usd": "0.0005"})
        await gateway.chat()
        newest, oldest = await gateway.rows()
        assert (newest.barred, oldest.barred) == ({}, {2: "cost", 3: "region"})
        async with gateway.parts.store.transaction() as connection:
            kept = (await connection.execute(select(requests.c.barred).where(requests.c.barred.is_not(None)))).scalars()
            assert list(kept) == [{"2": "cost", "3": "region"}]
