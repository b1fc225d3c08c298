"""Drawn answers are checked beside live traffic: within the budget, out of the way, once, whatever breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from backends.errors import BackendOverloaded, ContextLengthExceeded
from backends.protocol import Backend, GenerateRequest, Priority
from backends.testing import Script
from gateway.access.admission import Admission
from gateway.config.sections import VerificationConfig
from gateway.models.catalog import Catalog
from gateway.store.feedback import FeedbackBook
from gateway.store.store import Store
from gateway.store.tables import verification_texts, verifications
from gateway.store.verifications import Spent, VerificationQueue
from gateway.verify.answer_checker import AnswerChecker, make_graders
from gateway.verify.check_budget import CheckBudget, CheckLedger
from gateway.verify.grader_combination import GraderCombination
from gateway.verify.live_load import LiveLoad
from gateway.verify.metrics import VerificationMetrics
from gateway.verify.worker import VerificationWorker
from policies.policy import Policy
from tests.gateway.harness import Gateway, echo_backends, make_settings, running
from tests.gateway.raw import PATIENCE_S
from tests.gateway.records import NOW, make_record
from tests.gateway.verify.jobs import draw_jobs

ALL = {
    "verification__enabled": True,
    "verification__poll_s": 0.01,
    "verification__allowance_usd": 100.0,
    "policy__sampling_share": 1.0,
}
CHEAP: Mapping[str, Any] = {"suffice": {"max_tier": 1}}


async def read(store: Store, table: Any) -> list[dict[str, Any]]:
    async with store.transaction() as connection:
        return [dict(row) for row in (await connection.execute(select(table))).mappings()]


async def until_done(store: Store, num: int = 1, *, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
    """Rows of the checks once as many have ended."""
    async with asyncio.timeout(timeout_s):
        while True:
            rows = await read(store, verifications)
            if sum(row["finished_at"] is not None for row in rows) >= num:
                return rows
            await asyncio.sleep(0.01)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  what is waited for belongs to a server, which sets no event
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("top", "verdict"), [("The answer is 5.", 1), ("The answer is 6.", 0)])
async def test_a_cheap_answer_is_compared_with_the_top_tiers(
    tmp_path: Path, database_url: str, top: str, verdict: int
) -> None:
    settings = make_settings(tmp_path, database__url=database_url, **ALL)
    backends = echo_backends(Script(text="It is 5."), Script(text=top))
    async with running(settings, backends) as gateway:
        response = await gateway.chat("What is 2 plus 3?", **CHEAP, max_tokens=40, temperature=0.5)
        assert response.status_code == 200
        (row,) = await until_done(gateway.parts.store)
        (asked,) = gateway.backends["large"].requests
        assert (asked.priority, asked.sampling.max_tokens, asked.sampling.temperature) == (Priority.BACKGROUND, 40, 0.5)
        assert asked.messages[0].content == "What is 2 plus 3?"
        assert (await gateway.row()).verify_probability == row["inclusion_probability"] == 1.0
        shown = (await gateway.client.get("/metrics")).text
    assert (row["status"], row["direction"], row["tier"], row["against_tier"]) == ("done", "up", 1, 2)
    assert (row["verdict"], row["grader"]) == (verdict, "compare")
    assert row["scores"]["final_answer"] == verdict
    assert row["cost_nano_usd"] > 0
    assert 'suffice_verifications_total{ending="done"} 1.0' in shown


async def test_texts_are_gone_when_the_check_is_done(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, database__url=database_url, **ALL)
    async with running(settings) as gateway:
        await gateway.chat(**CHEAP)
        await until_done(gateway.parts.store)
        assert await read(gateway.parts.store, verification_texts) == []


async def test_a_dear_answer_is_checked_downward(tmp_path: Path, database_url: str) -> None:
    """Tier 2 answered; tier 1 would have said the same, so the upgrade was not needed."""
    settings = make_settings(tmp_path, database__url=database_url, policy__sampling__down_share=1.0, **ALL)
    async with running(settings, echo_backends(Script(text="5"), Script(text="5"))) as gateway:
        await gateway.chat(suffice={"min_tier": 2})
        (row,) = await until_done(gateway.parts.store)
        assert len(gateway.backends["small"].requests) == 1
    assert (row["direction"], row["tier"], row["against_tier"], row["verdict"]) == ("down", 2, 1, 1)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "simple"},
        {"n": 2, **CHEAP},
        {"suffice": {"policy": "careful"}},
    ],
    ids=["the caller named the tier", "several choices", "no other tier permitted"],
)
async def test_what_cannot_be_checked_is_not_drawn(tmp_path: Path, body: dict[str, Any]) -> None:
    settings = make_settings(tmp_path, policy__sampling__down_share=1.0, **ALL)
    async with running(settings) as gateway:
        assert (await gateway.chat(**body)).status_code == 200
        assert await read(gateway.parts.store, verifications) == []


async def test_nothing_is_drawn_where_nothing_may_be_kept(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, log__prompts="none", **ALL)) as gateway:
        await gateway.chat(**CHEAP)
        assert await read(gateway.parts.store, verifications) == []
        assert (await gateway.row()).verify_probability is None


async def test_a_failed_answer_is_not_drawn(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, policy__fallback="none", **ALL)
    async with running(settings, echo_backends(Script(fail_after=1))) as gateway:
        assert (await gateway.chat("one two three", **CHEAP)).status_code == 502
        assert await read(gateway.parts.store, verifications) == []


async def test_a_check_lets_a_waiting_request_pass(tmp_path: Path) -> None:
    """It is given back as untried, what it cost is kept, and it is done when the queue is empty again."""
    release = asyncio.Event()

    def large(request: GenerateRequest) -> Script:
        return Script(text="5", hang_after=None if release.is_set() else 1)

    def small(request: GenerateRequest) -> Script:
        return Script(text="5 5 5", token_delay_s=0.3 if "slow" in str(request.messages) else 0.0)

    settings = make_settings(tmp_path, server__max_concurrency=1, **ALL)
    backends = echo_backends(small, large)
    async with running(settings, backends) as gateway:
        await gateway.chat("quick", **CHEAP)
        await until(lambda: gateway.backends["large"].num_running == 1)
        slow = [asyncio.create_task(gateway.chat("slow", **CHEAP)) for _ in range(2)]
        await until(lambda: gateway.backends["large"].num_cancelled == 1)
        release.set()
        assert [(await task).status_code for task in slow] == [200, 200]
        rows = await until_done(gateway.parts.store, 3)
    assert {(row["status"], row["num_attempts"]) for row in rows} == {("done", 1)}
    assert gateway.parts.verifier.metrics.endings["yielded"] >= 1


async def test_closing_gives_the_job_back_at_once(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, database__url=database_url, **ALL)
    async with running(settings, echo_backends(Script(text="5"), Script(text="5 5", hang_after=1))) as gateway:
        await gateway.chat(**CHEAP)
        await until(lambda: gateway.backends["large"].num_running == 1)
    async with running(settings, echo_backends(Script(text="5"), Script(text="5"))) as gateway:
        (row,) = await until_done(gateway.parts.store)
    assert (row["status"], row["num_attempts"]) == ("done", 1)


class Bench:
    """A worker over echo backends without a gateway, its clock in the test's hands."""

    def __init__(self, store: Store, tmp_path: Path, backends: Mapping[str, Backend], **changes: Any) -> None:
        settings = make_settings(tmp_path)
        self.config = replace(VerificationConfig(poll_s=0.01, allowance_usd=100.0), **changes)
        self.store, self.queue, self.now = store, VerificationQueue(store), NOW
        self.admission = Admission(4, 4, 60.0)
        self.backends: Mapping[str, Any] = backends
        catalog = Catalog(settings.ladder, Policy(), {"default": Policy()}, backends)
        self.worker = VerificationWorker(
            self.config,
            self.queue,
            FeedbackBook(store),
            AnswerChecker(catalog, make_graders(self.config.graders), GraderCombination.load(self.config.combination)),
            LiveLoad(self.admission, backends.values(), self.config.max_live_requests),
            VerificationMetrics(),
            now=lambda: self.now,
        )

    async def rows(self) -> list[dict[str, Any]]:
        return sorted(await read(self.store, verifications), key=lambda row: row["verification_id"])


async def test_failures_are_retried_later_and_then_given_up(store: Store, tmp_path: Path) -> None:
    overloaded = Script(fail_before=BackendOverloaded("full", retry_after_s=3.0))
    bench = Bench(store, tmp_path, echo_backends(large=overloaded), max_attempts=3, retry_base_s=2.0)
    await draw_jobs(store, 1)
    waits = []
    for _ in range(3):
        assert await bench.worker.work_once()
        (row,) = await bench.rows()
        if row["status"] == "queued":
            waits.append((row["retry_at"] - bench.now).total_seconds())
            assert not await bench.worker.work_once()
            bench.now = row["retry_at"]
    assert waits == [3.0, 4.0]
    assert (row["status"], row["num_attempts"]) == ("failed", 3)
    assert "BackendOverloaded" in row["error"]
    assert await read(store, verification_texts) == []


async def test_what_no_retry_can_mend_fails_at_once(store: Store, tmp_path: Path) -> None:
    refuses = Script(fail_before=ContextLengthExceeded(9000, 8192, None))
    bench = Bench(store, tmp_path, echo_backends(large=refuses))
    await draw_jobs(store, 1)
    await draw_jobs(store, 1, prompt="not JSON", created_at=NOW + timedelta(seconds=1))
    await draw_jobs(store, 1, against_tier=9, created_at=NOW + timedelta(seconds=2))
    for _ in range(3):
        assert await bench.worker.work_once()
    assert [(row["status"], row["num_attempts"]) for row in await bench.rows()] == [("failed", 1)] * 3


async def test_no_check_begins_in_the_way_of_live_requests(store: Store, tmp_path: Path) -> None:
    bench = Bench(store, tmp_path, echo_backends(), max_live_requests=1, overdue_s=60.0)
    await draw_jobs(store, 2)
    places = []
    for _ in range(2):
        places.append(await bench.admission.enter(Priority.LIVE))
    assert not await bench.worker.work_once()
    bench.now = NOW + timedelta(seconds=61)
    assert await bench.worker.work_once(), "an overdue one begins beside them"
    bench.admission.leave(places.pop())
    assert await bench.worker.work_once()
    await draw_jobs(store, 1)
    for _ in range(3):
        places.append(await bench.admission.enter(Priority.LIVE))
    waiting = asyncio.create_task(bench.admission.enter(Priority.LIVE))
    await asyncio.sleep(0)
    assert not await bench.worker.work_once(), "but never while one waits"
    waiting.cancel()


async def test_the_budget_stops_the_work_and_more_serving_lets_it_go_on(store: Store, tmp_path: Path) -> None:
    """The first check says what one costs; the next begin only when 5 % of serving pays for them."""
    bench = Bench(store, tmp_path, echo_backends(), method="generate", max_cost_share=0.05, allowance_usd=0.0)
    await draw_jobs(store, 3)
    await store.record(make_record(cost_usd=Decimal("0.4")))
    bench.now = NOW + timedelta(seconds=10)
    await bench.worker.look()
    assert await bench.worker.work_once()
    assert not await bench.worker.work_once()
    spent = (await bench.queue.spent_since(NOW)).cost_usd
    assert spent >= Decimal("0.01"), "tier 2's price of an answer"
    await store.record(make_record(cost_usd=Decimal("0.5")))
    await bench.worker.look()
    assert await bench.worker.work_once()
    await bench.worker.look()
    assert (await bench.queue.spent_since(NOW)).cost_usd <= Decimal("0.05") * Decimal("0.9")


def test_every_limit_of_the_budget_holds() -> None:
    one = Spent(Decimal("0.01"), 2.0)
    rich = CheckLedger(served_hour_usd=Decimal(100))
    assert CheckBudget(VerificationConfig()).allows(rich, one)
    for limits, fits in [
        ({"max_usd_per_hour": 0.01}, True),
        ({"max_usd_per_hour": 0.009}, False),
        ({"max_usd_per_day": 0.009}, False),
        ({"max_compute_s_per_hour": 1.9}, False),
        ({"max_compute_s_per_day": 2.0}, True),
        ({"max_compute_s_per_day": 0.0}, False),
        ({"max_cost_share": 0.0, "allowance_usd": 0.0}, False),
        ({"max_cost_share": 0.0, "allowance_usd": 0.02}, True),
    ]:
        assert CheckBudget(VerificationConfig(**limits)).allows(rich, one) is fits, limits
    assert not CheckBudget(VerificationConfig(max_usd_per_day=1.0)).allows(replace(rich, day=Spent(Decimal(1))), one)


async def test_what_is_behind_slows_the_drawing(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, verification__worker=False, verification__overdue_s=1.0, **ALL)
    async with running(settings) as gateway:
        await draw_jobs(gateway.parts.store, 1, created_at=datetime.now(UTC) - timedelta(seconds=30))
        for _ in range(3):
            await gateway.parts.verifier.look()
        throttle = gateway.parts.verifier.metrics.throttle
        assert throttle < 0.5
        await gateway.chat(**CHEAP)
        newest = (await gateway.rows())[0]
        assert newest.verify_probability == pytest.approx(throttle)


async def test_two_servers_on_one_database_check_each_answer_once(tmp_path: Path, postgres_url: str) -> None:
    settings = make_settings(tmp_path, database__url=postgres_url, **ALL)

    async def serve(gateway: Gateway) -> None:
        await asyncio.gather(*(gateway.chat(f"{place}", **CHEAP) for place in range(15)))

    async with running(settings) as one, running(settings, echo_backends()) as two:
        await asyncio.gather(serve(one), serve(two))
        rows = await until_done(one.parts.store, 30)
        asked = one.backends["large"].requests + two.backends["large"].requests
    assert {row["status"] for row in rows} == {"done"}
    assert len(rows) == len({row["request_id"] for row in rows}) == 30
    assert sorted(request.request_id for request in asked) == sorted(f"verify-{row['verification_id']}" for row in rows)


async def test_reading_writes_nothing(store: Store, tmp_path: Path) -> None:
    """Downward there is nothing to read: the lower tier has to be asked."""
    bench = Bench(store, tmp_path, echo_backends(), method="score")
    await draw_jobs(store, 1)
    await draw_jobs(store, 1, direction="down", tier=2, against_tier=1, created_at=NOW + timedelta(seconds=1))
    assert await bench.worker.work_once()
    assert bench.backends["large"].requests == bench.backends["small"].requests == []
    assert await bench.worker.work_once()
    assert len(bench.backends["small"].requests) == 1
    up, down = await bench.rows()
    assert (up["grader"], down["grader"]) == ("read", "compare_and_read")
    assert "overlap" not in up["scores"]


async def test_what_is_too_dear_to_write_is_read(store: Store, tmp_path: Path) -> None:
    """The top tier's answer costs a cent by its table; reading is done where that would exceed the budget."""
    bench = Bench(store, tmp_path, echo_backends(), max_usd_per_hour=0.033)
    await draw_jobs(store, 3)
    for _ in range(2):
        assert await bench.worker.work_once()
    assert len(bench.backends["large"].requests) == 1
    assert [row["grader"] for row in await bench.rows()][:2] == ["compare_and_read", "read"]
    assert not await bench.worker.work_once()
    assert (await bench.queue.spent_since(NOW)).cost_usd <= Decimal("0.033")
