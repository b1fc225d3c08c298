"""Feedback costs its key a request, is bounded for each request, and is summed by the database (security review H8)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from sqlalchemy import event

from gateway.ids import uuid7
from gateway.store.feedback import MAX_REPORTED_CHARS, MAX_REPORTS, FeedbackBook, GoldLabel, GoldSource
from gateway.store.monitoring import MonitorReader
from gateway.store.pruning import LogPruner
from gateway.store.store import Store
from gateway.store.tables import feedback, gold_labels
from gateway.store.verifications import CheckResult, VerificationQueue
from policies.judge_correction import GoldCounts
from tests.gateway.access.test_limits_http import ask, limited
from tests.gateway.harness import Gateway, assert_error, make_settings, running
from tests.gateway.records import NOW
from tests.gateway.verify.jobs import draw_jobs
from tests.gateway.verify.test_worker import read

RANK = ["feedback", "checker", "reference", "admin"]


async def report(gateway: Gateway, headers: dict[str, str], about: str, **body: Any) -> Any:
    asked = {"request_id": about, "kind": "correct", "value": True} | body
    return await gateway.client.post("/v1/feedback", json=asked, headers=headers)


@pytest.mark.parametrize("body", [{}, {"request_id": uuid7()}, {"kind": "nonsense"}], ids=["kept", "unknown", "bad"])
async def test_a_report_is_a_request_of_its_key(tmp_path: Path, database_url: str, body: dict[str, Any]) -> None:
    """Whether it is kept or refused."""
    async with running(make_settings(tmp_path, database__url=database_url)) as gateway:
        headers = await limited(gateway, requests_per_minute=3)
        request_id = (await ask(gateway, headers)).headers["x-suffice-request-id"]
        answers = [await report(gateway, headers, request_id, **body) for _ in range(8)]
        refused = [each for each in answers if each.status_code == 429]
        assert len(refused) >= 2, "also where the minute turned in between"
        assert_error(refused[0], 429, "rate_limit_exceeded")
        free = await limited(gateway)
        request_id = (await ask(gateway, free)).headers["x-suffice-request-id"]
        assert (await report(gateway, free, request_id)).status_code == 200


async def test_reports_count_after_a_restart(tmp_path: Path, database_url: str) -> None:
    """The books begin with the log's sums; reports are in the log too."""
    settings = make_settings(tmp_path, database__url=database_url)
    async with running(settings) as gateway:
        headers = await limited(gateway, requests_per_minute=5)
        request_id = (await ask(gateway, headers)).headers["x-suffice-request-id"]
        num_kept = sum([(await report(gateway, headers, request_id)).status_code == 200 for _ in range(3)])
    async with running(settings) as gateway:
        answers = [await report(gateway, headers, request_id) for _ in range(8)]
        assert num_kept == 3
        assert sum(each.status_code == 200 for each in answers) <= 6, "one, or one and another minute's five"


async def test_reports_about_one_request_are_few(tmp_path: Path, database_url: str) -> None:
    """Also where they come together."""
    async with running(make_settings(tmp_path, database__url=database_url)) as gateway:
        headers = await limited(gateway)
        request_id = (await ask(gateway, headers)).headers["x-suffice-request-id"]
        answers = await asyncio.gather(*(report(gateway, headers, request_id) for _ in range(MAX_REPORTS + 5)))
        assert sorted(each.status_code for each in answers) == [200] * MAX_REPORTS + [400] * 5
        assert_error(next(each for each in answers if each.status_code == 400), 400, "too_much_feedback")
        assert len(await read(gateway.parts.store, feedback)) == MAX_REPORTS
        assert len(await read(gateway.parts.store, gold_labels)) == MAX_REPORTS


async def test_texts_about_one_request_are_bounded_together(tmp_path: Path, database_url: str) -> None:
    async with running(make_settings(tmp_path, database__url=database_url)) as gateway:
        headers = await limited(gateway)
        request_id = (await ask(gateway, headers)).headers["x-suffice-request-id"]
        size = 65_536
        texts = {"kind": "reference", "value": None, "reference": "x" * size, "comment": "y" * size}
        once = texts | {"idempotency_key": "once"}
        assert (await report(gateway, headers, request_id, **once)).status_code == 200
        answers = [await report(gateway, headers, request_id, **texts) for _ in range(3)]
        num_fitting = MAX_REPORTED_CHARS // (2 * size) - 1
        assert [each.status_code for each in answers] == [200] * num_fitting + [400] * (3 - num_fitting)
        again = await report(gateway, headers, request_id, **once)
        assert again.status_code == 200, "a repetition adds nothing"


def naive_counts(checks: list[tuple[str, int, int, int]], labels: list[GoldLabel]) -> GoldCounts:
    """The definition, label by label."""
    best: dict[tuple[str, int], tuple[int, float]] = {}
    for each in labels:
        key, rank = (each.request_id, each.tier), RANK.index(each.source)
        if key not in best or rank >= best[key][0]:
            best[key] = (rank, each.label)
    found = [0, 0, 0, 0]
    for request_id, tier, against, verdict in checks:
        cheap, dear = (best.get((request_id, each)) for each in (min(tier, against), max(tier, against)))
        if cheap is None or (cheap[1] < 0.5 and dear is None):
            continue
        is_fault = cheap[1] < 0.5 and dear is not None and dear[1] >= 0.5
        found[0 if is_fault else 2] += verdict == 0
        found[1 if is_fault else 3] += 1
    return GoldCounts(*found)


@pytest.mark.parametrize("seed", range(3))
async def test_the_database_sums_labels_as_they_are_defined(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    queue, book = VerificationQueue(store), FeedbackBook(store)
    checks, labels = [], []
    for _ in await draw_jobs(store, 12):
        claim = await queue.claim("w", NOW, lease_s=60, max_attempts=5)
        assert claim is not None
        p_good = rng.choice([0.1, 0.9])
        await queue.complete(claim, CheckResult(p_good=p_good, grader="g", grader_version="1"), NOW, keep_texts=False)
        checks.append((claim.job.request_id, claim.job.tier, claim.job.against_tier, int(p_good >= 0.5)))

    for request_id, *_ in checks:
        for _ in range(rng.randrange(6)):
            source: GoldSource = rng.choice(get_args(GoldSource))
            value = rng.choice([0.0, 0.4, 0.5, 1.0])
            labels.append(
                GoldLabel(request_id=request_id, tier=rng.choice([1, 2]), source=source, label=value, created_at=NOW)
            )
    await book.add_gold(labels)
    assert await book.gold_counts() == naive_counts(checks, labels)


async def test_labels_are_summed_only_when_something_is_new(store: Store) -> None:
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(store._engine.sync_engine, "before_cursor_execute", note)
    reader, book, queue = MonitorReader(store), FeedbackBook(store), VerificationQueue(store)

    async def num_sums() -> int:
        statements.clear()
        await reader.gold(1)
        # Never a label by itself: what is fetched are counts.
        assert not [each for each in statements if each.startswith("SELECT gold_labels")]
        return sum("row_number" in each for each in statements)

    (job, _other) = await draw_jobs(store, 2)
    assert [await num_sums() for _ in range(3)] == [1, 0, 0]
    await book.add_gold([GoldLabel(request_id=job.request_id, tier=1, source="admin", label=1.0, created_at=NOW)])
    assert [await num_sums() for _ in range(3)] == [1, 0, 0]
    claim = await queue.claim("w", NOW, lease_s=60, max_attempts=5)
    assert claim is not None
    await queue.complete(claim, CheckResult(p_good=0.9, grader="g", grader_version="1"), NOW, keep_texts=False)
    assert [await num_sums() for _ in range(3)] == [1, 0, 0]
    await LogPruner(store).rows(NOW.replace(year=2100))
    assert [await num_sums() for _ in range(2)] == [1, 0]
