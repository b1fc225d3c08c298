"""Feedback over HTTP: kept once, never changed, only about one's own requests, and made into gold labels."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from backends.testing import Script
from gateway.ids import uuid7
from gateway.store.feedback import FeedbackBook, GoldLabel, GoldSource
from gateway.store.pruning import LogPruner
from gateway.store.store import Store
from gateway.store.tables import feedback, gold_labels
from gateway.store.verifications import CheckResult, VerificationQueue
from policies.judge_correction import GoldCounts
from tests.gateway.access.test_authenticator import add_key, bearer
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running
from tests.gateway.records import NOW
from tests.gateway.verify.jobs import draw_jobs
from tests.gateway.verify.test_worker import ALL, CHEAP, read, until_done


async def ask(gateway: Gateway, **body: Any) -> str:
    """Ask and give the request's id."""
    response = await gateway.chat("What is 2 plus 3?", **body)
    assert response.status_code == 200
    request_id: str = response.headers["x-suffice-request-id"]
    return request_id


async def gold(store: Store) -> set[tuple[int, str, float]]:
    return {(row["tier"], row["source"], row["label"]) for row in await read(store, gold_labels)}


@pytest.mark.parametrize(
    ("report", "labels"),
    [
        ({"kind": "correct", "value": True}, {(1, "feedback", 1.0)}),
        ({"kind": "correct", "value": False}, {(1, "feedback", 0.0)}),
        ({"kind": "rating", "value": 0.25}, {(1, "feedback", 0.25)}),
        ({"kind": "preferred_tier", "value": 2}, {(1, "feedback", 0.0), (2, "feedback", 1.0)}),
        ({"kind": "preferred_tier", "value": 1}, {(1, "feedback", 1.0)}),
        ({"kind": "reference", "reference": "5"}, set()),
    ],
)
async def test_reports_are_kept_and_make_gold(
    tmp_path: Path, database_url: str, report: dict[str, Any], labels: set[tuple[int, str, float]]
) -> None:
    settings = make_settings(tmp_path, database__url=database_url)
    async with running(settings) as gateway:
        request_id = await ask(gateway, **CHEAP)
        body = {"request_id": f"chatcmpl-{request_id}", "comment": "so\0so", "metadata": {"user": 7}, **report}
        response = await gateway.client.post("/v1/feedback", json=body)
        assert response.status_code == 200, response.text
        shown = response.json()
        (row,) = await read(gateway.parts.store, feedback)
        assert await gold(gateway.parts.store) == labels
    assert (shown["object"], shown["request_id"], shown["kind"]) == ("feedback", request_id, report["kind"])
    assert (row["feedback_id"], row["comment"], row["metadata"]) == (
        shown["id"],
        "so\N{REPLACEMENT CHARACTER}so",
        {"user": 7},
    )
    assert row["value"] == report.get("value")


async def test_the_same_key_twice_is_one_report(tmp_path: Path, database_url: str) -> None:
    async with running(make_settings(tmp_path, database__url=database_url)) as gateway:
        request_id = await ask(gateway, **CHEAP)
        body = {"request_id": request_id, "kind": "correct", "value": True}
        headers = {"idempotency-key": "once"}
        first = await gateway.client.post("/v1/feedback", json=body, headers=headers)
        again = await gateway.client.post("/v1/feedback", json=body | {"idempotency_key": "once"})
        assert (first.status_code, again.status_code) == (200, 200)
        assert first.json() == again.json()
        other = await gateway.client.post("/v1/feedback", json=body | {"value": False}, headers=headers)
        assert_error(other, 409, "idempotency_key_reused", "Idempotency-Key")
        assert len(await read(gateway.parts.store, feedback)) == 1
        assert await gold(gateway.parts.store) == {(1, "feedback", 1.0)}
        fresh = await gateway.client.post("/v1/feedback", json=body | {"value": False})
        assert fresh.status_code == 200
        assert len(await read(gateway.parts.store, feedback)) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"request_id": None}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"kind": None}, "kind"),
        ({"kind": "like"}, "kind"),
        ({"value": None}, "value"),
        ({"value": 2}, "value"),
        ({"kind": "correct", "value": 1}, "value"),
        ({"kind": "preferred_tier", "value": 3}, "value"),
        ({"kind": "reference", "value": None}, "reference"),
        ({"kind": "reference", "reference": "5"}, "value"),
        ({"comment": ""}, "comment"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"big": "x" * 20_000}}, "metadata"),
        ({"metadata": {"nul": "\0"}}, "metadata"),
        ({"idempotency_key": "a different one"}, "idempotency_key"),
    ],
)
async def test_bad_reports_are_refused_by_field(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        request_id = await ask(gateway, **CHEAP)
        body = {"request_id": request_id, "kind": "rating", "value": 1} | change
        response = await gateway.client.post("/v1/feedback", json=body, headers={"idempotency-key": "k"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert await read(gateway.parts.store, feedback) == []


async def test_only_ones_own_requests_can_be_reported_on(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, auth__required="always")) as gateway:
        headers = {tenant: bearer((await add_key(gateway, tenant))[0]) for tenant in ("us", "them")}
        gateway.client.headers.update(headers["us"])
        request_id = await ask(gateway, **CHEAP)
        body = {"request_id": request_id, "kind": "correct", "value": True}
        theirs = await gateway.client.post("/v1/feedback", json=body, headers=headers["them"])
        assert_error(theirs, 404, "request_not_found")
        for unknown in (uuid7(), "nonsense"):
            assert_error(
                await gateway.client.post("/v1/feedback", json=body | {"request_id": unknown}), 404, "request_not_found"
            )
        nobody = await gateway.client.post("/v1/feedback", json=body, headers=bearer("x"))
        assert nobody.status_code == 401
        assert (await gateway.client.post("/v1/feedback", json=body)).status_code == 200


async def test_a_reference_labels_both_answers_when_the_check_is_done(tmp_path: Path) -> None:
    """The texts are gone afterwards, so they are compared while they are there."""
    settings = make_settings(tmp_path, **(ALL | {"verification__worker": False}))
    backends = echo_backends(Script(text="It is 6."), Script(text="It is 5."))
    async with running(settings, backends) as gateway:
        request_id = await ask(gateway, **CHEAP)
        body = {"request_id": request_id, "kind": "reference", "reference": "5"}
        assert (await gateway.client.post("/v1/feedback", json=body)).status_code == 200
        assert await gold(gateway.parts.store) == {(1, "reference", 0.0)}
        await gateway.parts.verifier.look()
        assert await gateway.parts.verifier.work_once()
        await until_done(gateway.parts.store)
        assert await gold(gateway.parts.store) == {(1, "reference", 0.0), (2, "reference", 1.0)}
        book = FeedbackBook(gateway.parts.store)
        assert await book.gold_counts() == GoldCounts(1, 1, 0, 0)


async def test_gold_measures_the_graders(store: Store) -> None:
    """A fault needs both labels: the cheap answer wrong, the dear one right."""
    queue, book = VerificationQueue(store), FeedbackBook(store)
    cases: list[tuple[dict[int, float], float]] = [
        ({1: 0.0, 2: 1.0}, 0.1),
        ({1: 0.0, 2: 1.0}, 0.9),
        ({1: 0.0, 2: 0.0}, 0.2),
        ({1: 1.0}, 0.8),
        ({1: 0.0}, 0.1),
        ({2: 1.0}, 0.1),
    ]
    for labels, p_good in cases:
        (job,) = await draw_jobs(store, 1)
        claim = await queue.claim("w", NOW, lease_s=60, max_attempts=5)
        assert claim is not None
        result = CheckResult(p_good=p_good, grader="compare", grader_version="1")
        assert await queue.complete(claim, result, NOW, keep_texts=False)
        await book.add_gold(label(job.request_id, tier, value, "checker") for tier, value in labels.items())
    assert await book.gold_counts() == GoldCounts(1, 2, 1, 2)
    assert await book.gold_counts(policy_name="other") == GoldCounts(0, 0, 0, 0)
    # The surer source wins: an operator says that the last case's cheap answer was right.
    await book.add_gold([label(job.request_id, 1, 1.0, "admin"), label(job.request_id, 1, 0.0, "feedback")])
    assert await book.gold_counts() == GoldCounts(1, 2, 2, 3)


def label(request_id: str, tier: int, value: float, source: GoldSource) -> GoldLabel:
    return GoldLabel(request_id=request_id, tier=tier, source=source, label=value, created_at=NOW)


async def test_feedback_goes_with_its_request(store: Store) -> None:
    (job,) = await draw_jobs(store, 1)
    await FeedbackBook(store).add_gold([label(job.request_id, 1, 1.0, "admin")])
    await LogPruner(store).rows(datetime.now(UTC))
    async with store.transaction() as connection:
        assert (await connection.execute(select(gold_labels))).all() == []
