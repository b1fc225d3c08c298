"""The log over HTTP: listed by pages, summed, explained, replayed, and policies tried on it."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from classifier.types import TierSufficiency
from gateway.ids import uuid7
from gateway.store.records import RequestRecord
from gateway.store.tables import verifications
from policies.exploration import propensities
from tests.gateway.admin.kit import Admin, administered
from tests.gateway.records import make_record

NOW = datetime.now(UTC)


def record(**changes: Any) -> RequestRecord:
    """A row that tier 1 answered well enough, as the router had thought."""
    fields: dict[str, Any] = {
        "created_at": NOW,
        "policy_name": "default",
        "sufficiency": (TierSufficiency(1, 0.9, 0.97), TierSufficiency(2, 0.95, 1.0)),
        "novelty": 0.1,
        "decided_tier": 1,
        "final_tier": 1,
        "model_served": "small",
        "ladder": (2,),
        "propensity": 0.99,
        "propensities": {1: 0.99, 2: 0.01},
        "reason": "sufficient",
        "prompt_tokens": 10,
        "completion_tokens": 20,
        "cost_usd": Decimal("0.0001"),
        "router_version": "r1",
    }
    return make_record(**(fields | changes))


async def put(admin: Admin, *records: RequestRecord) -> None:
    for each in records:
        await admin.gateway.parts.store.record(each)


async def check(admin: Admin, request_id: str, p_good: float, inclusion_probability: float) -> None:
    """A finished check of an answer of tier 1."""
    values = {
        "verification_id": uuid7(), "request_id": request_id, "created_at": NOW, "direction": "up", "tier": 1,
        "against_tier": 2, "inclusion_probability": inclusion_probability, "stratum": "", "tenant": "default",
        "domain": "", "policy_name": "default", "policy_version": "1", "router_version": "r1", "status": "done",
        "num_attempts": 1, "finished_at": NOW, "p_good": p_good, "verdict": int(p_good > 0.5), "scores": {},
        "cost_nano_usd": 5000,
    }  # fmt: skip
    async with admin.gateway.parts.store.transaction() as connection:
        await connection.execute(verifications.insert().values(**values))


async def test_pages_meet_and_filters_hold(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        rows = [record(tenant=f"t{i % 3}", status_code=200 if i % 2 else 503) for i in range(11)]
        await put(admin, *rows)
        found, path = [], "/requests?limit=4"
        cursor: str | None = ""
        while cursor is not None:
            page = await admin.get(path + (f"&cursor={cursor}" if cursor else ""))
            found += [each["id"] for each in page["data"]]
            cursor = page["next"]
        assert found == [each.request_id for each in reversed(rows)]
        assert len((await admin.get("/requests?tenant=t1&status=200"))["data"]) == 2
        later = (NOW + timedelta(seconds=1)).isoformat().replace("+", "%2B")
        assert (await admin.get(f"/requests?since={later}"))["data"] == []
        assert len((await admin.get(f"/requests?until={later}"))["data"]) == 11
        for query, param in (
            ("limit=0", "limit"),
            ("limit=many", "limit"),
            ("cursor=x", "cursor"),
            ("since=yesterday", "since"),
            ("since=2026-01-01T00:00:00", "since"),
            ("tier=one", "tier"),
            ("colour=red", "colour"),
            ("limit=1&limit=2", "limit"),
        ):
            refused = await admin("GET", f"/requests?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_request_is_explained_with_what_came_of_it(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        row = record(tenant="somebody")
        await put(admin, row)
        await check(admin, row.request_id, 0.8, 0.05)
        shown = await admin.get(f"/requests/chatcmpl-{row.request_id}")
        assert (shown["tenant"], shown["decision"]["tier"], shown["tiers"][1]["cost_usd"]) == ("somebody", 1, "0.01020")
        (found,) = shown["verifications"]
        assert (found["p_good"], found["cost_usd"]) == (0.8, "0.000005")
        today = shown["replay"]["today"]
        assert (today["tier"], today["differs"]) == (1, False)
        body, tag = await admin.body()
        await admin("PUT", "/policies/default", json=body | {"quality_floor": 0.99}, headers={"if-match": tag})
        today = (await admin.get(f"/requests/{row.request_id}"))["replay"]["today"]
        assert (today["tier"], today["reason"], today["differs"]) == (2, "none_suffices", True)
        pinned = record(overrides={"tier": 1}, reason="pinned", propensities={1: 1.0}, propensity=1.0)
        explored = record(explored=True, decided_tier=2, final_tier=2, reason="explored", propensity=0.01)
        unknown = record(policy_name="gone")
        vectors = record(
            endpoint="/v1/embeddings", decided_tier=None, final_tier=None, propensity=None, propensities={}
        )
        await put(admin, pinned, explored, unknown, vectors)
        assert not (await admin.get(f"/requests/{pinned.request_id}"))["replay"]["today"]["differs"]
        assert (await admin.get(f"/requests/{explored.request_id}"))["replay"]["today"]["differs"]
        for each in (unknown, vectors):
            assert (await admin.get(f"/requests/{each.request_id}"))["replay"]["today"] is None
        for wrong in ("none", uuid7()):
            await admin.error("GET", f"/requests/{wrong}", 404, "not_found")


async def test_a_served_request_replays_to_itself(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        for model in ("auto", "simple", "careful"):
            answer = await admin.gateway.chat("hi", model=model)
            shown = await admin.get(f"/requests/{answer.headers['x-suffice-request-id']}")
            assert not shown["replay"]["today"]["differs"], model
            assert shown["replay"]["same_policy_and_router"]
            assert str(shown["decision"]["tier"]) == answer.headers["x-suffice-tier"]


async def test_usage_sums_and_says_what_was_saved(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        yesterday = NOW - timedelta(days=1)
        await put(
            admin,
            record(tenant="a"),
            record(tenant="a", created_at=yesterday),
            record(tenant="b", decided_tier=2, final_tier=2, cost_usd=Decimal("0.0102")),
            record(tenant="b", decided_tier=None, final_tier=None, endpoint="/v1/embeddings", cost_usd=Decimal(0)),
        )
        found = await admin.get("/usage?group_by=tenant")
        by_tenant = {each["tenant"]: each for each in found["data"]}
        assert (by_tenant["a"]["num_requests"], by_tenant["a"]["cost_usd"]) == (2, "0.0002")
        # The top tier takes $0.01 a request and $0.00001 a token of the answer.
        assert Decimal(by_tenant["a"]["all_top_tier_usd"]) == 2 * (Decimal("0.01") + 20 * Decimal("0.00001"))
        assert Decimal(by_tenant["b"]["saved_usd"]) == 0
        assert found["total"]["num_requests"] == 4
        days = (await admin.get("/usage?group_by=day,tier"))["data"]
        assert {each["day"] for each in days} == {f"{yesterday:%Y-%m-%d}", f"{NOW:%Y-%m-%d}"}
        for group in ("key", "policy", "model"):
            assert sum(each["num_requests"] for each in (await admin.get(f"/usage?group_by={group}"))["data"]) == 4
        await admin.error("GET", "/usage?group_by=colour", 400, "invalid_value", "group_by")
        assert (await admin.get("/usage?tenant=nobody"))["total"]["cost_usd"] == "0"


async def fill(admin: Admin, num_rows: int, share: float) -> float:
    """Requests of which tier 1 answers half well enough, by an exploring policy; returns the truth for "all to 1"."""
    rng = random.Random(1)
    chances = propensities(1, (1, 2), share)
    good = 0
    for _ in range(num_rows):
        is_good = rng.random() < 0.5
        good += is_good
        tier = 1 if rng.random() < chances[1] else 2
        cost = Decimal("0.0001") if tier == 1 else Decimal("0.0102")
        drawn = {"explored": tier != 1, "reason": "explored" if tier != 1 else "sufficient"}
        row = record(
            **drawn, decided_tier=tier, final_tier=tier, propensities=chances, propensity=chances[tier], cost_usd=cost
        )
        await put(admin, row)
        if tier == 1 and rng.random() < 0.5:
            await check(admin, row.request_id, float(is_good), 0.5)
    return good / num_rows


@pytest.mark.slow
async def test_a_policy_is_tried_before_it_is_saved(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        truth = await fill(admin, 600, share=0.4)
        body, _ = await admin.body()
        cheap = body | {"thresholds": {"1": 0.0}, "exploration_share": 0.0}
        found = (await admin("POST", "/what-if", json={"policy": cheap, "last": 5000})).json()
        assert (found["num_rows"], found["complete"]) == (600, True)
        assert [each["share"] for each in found["tiers"]] == [1.0, 0.0]
        quality = found["quality"]["estimate"]
        assert quality["low"] <= truth <= quality["high"]
        assert quality["high"] - quality["low"] < 0.3
        assert found["cost"]["expected_usd"] == pytest.approx(600 * 0.0001)
        assert found["cost"]["change_per_request_usd"]["high"] < 0
        dear = (await admin("POST", "/what-if", json={"policy": body | {"quality_floor": 0.99}, "last": 100})).json()
        (move,) = dear["moved"]["moves"]
        assert (move["from"], move["to"], len(move["examples"])) == (1, 2, 5)
        assert dear["moved"]["num_requests"] == move["num_requests"] <= 100
        assert dear["quality"]["num_graded"] >= 30
        assert dear["quality"]["estimate"]["value"] > 0.9
        kept = await admin.get("/evaluations?kind=whatif")
        assert {each["evaluation_id"] for each in kept["data"]} == {found["evaluation_id"], dear["evaluation_id"]}
        assert (await admin.get(f"/evaluations/{found['evaluation_id']}"))["body"]["num_rows"] == 600
        assert (await admin.body())[0] == body, "nothing was saved"
        now = (await admin("POST", "/what-if", json={})).json()
        assert now["moved"]["num_requests"] == 0


async def test_what_the_log_never_tried_is_not_guessed(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        await fill(admin, 150, share=0.0)
        body, _ = await admin.body()
        found = (await admin("POST", "/what-if", json={"policy": body | {"quality_floor": 0.99}})).json()
        assert found["quality"]["estimate"] is None
        assert found["quality"]["num_unsupported"] > 30
        await admin.error("POST", "/what-if", 404, "not_found", json={"name": "none"})
        await admin.error("POST", "/what-if", 400, "invalid_value", "last", json={"last": 10**6})


async def test_a_trial_ends_with_its_time(tmp_path: Path) -> None:
    async with administered(tmp_path, admin__what_if_timeout_s=0.1) as admin:
        await fill(admin, 60, share=0.1)
        from gateway.admin.policy_replay import PolicyReplay

        catalog = admin.gateway.parts.catalog
        rows = await admin.gateway.rows()
        trial = PolicyReplay(catalog.resolve("auto").policy, catalog, until_s=5.0, clock=iter([0.0, 6.0]).__next__)
        assert not trial.add(rows, {})
        assert 0 < trial.tally.num_rows < 60
        assert trial.report()["num_rows"] == trial.tally.num_rows
