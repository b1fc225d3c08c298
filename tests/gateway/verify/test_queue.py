"""The queue of checks: committed with the answer's row or not at all, claimed by one, finished once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from gateway.store.errors import RecordRejected
from gateway.store.records import VerificationJob
from gateway.store.store import Store
from gateway.store.tables import requests, verification_texts, verifications
from gateway.store.verifications import NOTHING, CheckResult, QueueState, Spent, VerificationQueue
from tests.gateway.records import NOW, make_record
from tests.gateway.verify.jobs import draw_jobs, make_job

ROOT = Path(__file__).parents[3]
LEASE_S = 60.0
GOOD = CheckResult(
    p_good=0.9, grader="compare", grader_version="1", scores={"overlap": 0.5}, spent=Spent(Decimal("0.001"), 2.0)
)


@pytest.fixture
def queue(store: Store) -> VerificationQueue:
    return VerificationQueue(store)


async def count(store: Store, table: Any, *where: Any) -> int:
    async with store.transaction() as connection:
        return int((await connection.execute(select(func.count()).select_from(table).where(*where))).scalar_one())


async def row_of(store: Store, job: VerificationJob) -> dict[str, Any]:
    async with store.transaction() as connection:
        found = await connection.execute(
            select(verifications).where(verifications.c.verification_id == job.verification_id)
        )
        return dict(found.mappings().one())


async def test_a_job_comes_with_its_row(store: Store, queue: VerificationQueue) -> None:
    (job,) = await draw_jobs(store, 1, domain="math", sampling={"stop": ["\n"]})
    assert await store.get_request(job.request_id) is not None
    claim = await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=5)
    assert claim is not None
    assert claim.job == job
    assert (await row_of(store, job))["status"] == "running"


async def test_a_claim_by_a_clock_that_was_ahead_does_not_last_for_years(
    store: Store, queue: VerificationQueue
) -> None:
    """As the leader's lease, of which a row may be left that says 2099 (security review L6)."""
    (job,) = await draw_jobs(store, 1)
    ahead = await queue.claim("ahead", NOW + timedelta(days=365 * 73), lease_s=LEASE_S, max_attempts=5)
    assert ahead is not None
    claim = await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=5)
    assert claim is not None
    assert claim.job.verification_id == job.verification_id
    assert not await queue.renew(ahead, NOW, lease_s=LEASE_S)


async def test_a_lease_lasts_to_its_last_moment_and_a_retry_waits_for_its_own(
    store: Store, queue: VerificationQueue
) -> None:
    moment, limits = timedelta(microseconds=1), {"max_age_s": 3600.0, "max_attempts": 2}
    await draw_jobs(store, 1)
    ends = NOW + timedelta(seconds=LEASE_S)
    assert await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=2) is not None
    assert await queue.claim("x", ends, lease_s=LEASE_S, max_attempts=2) is None
    again = await queue.claim("x", ends + moment, lease_s=LEASE_S, max_attempts=2)
    assert again is not None
    assert await queue.retry(again, "busy", NOTHING, ends + timedelta(seconds=5))
    assert await queue.claim("y", ends + timedelta(seconds=5) - moment, lease_s=LEASE_S, max_attempts=9) is None
    assert await queue.claim("y", ends + timedelta(seconds=5), lease_s=LEASE_S, max_attempts=2) is None
    last = await queue.claim("y", ends + timedelta(seconds=5), lease_s=LEASE_S, max_attempts=3)
    assert last is not None
    assert last.num_attempts == 3
    ends += timedelta(seconds=5 + LEASE_S)
    assert await queue.sweep(ends, **limits) == (0, 0), "somebody may still be at it"
    assert await queue.sweep(ends + moment, **limits) == (0, 1)


async def test_a_job_is_too_old_after_its_age_and_not_at_it(store: Store, queue: VerificationQueue) -> None:
    await draw_jobs(store, 1)
    old, moment = NOW + timedelta(seconds=60), timedelta(microseconds=1)
    assert await queue.sweep(old, max_age_s=60.0, max_attempts=1) == (0, 0)
    assert await queue.sweep(old + moment, max_age_s=60.0, max_attempts=1) == (1, 0)
    assert await count(store, verification_texts) == 0


async def test_a_row_that_is_refused_leaves_no_job(store: Store) -> None:
    """And its neighbours in the same commit keep theirs."""
    good = [make_record(final_tier=1) for _ in range(5)]
    poison = make_record(final_tier=1, tenant=None)
    written = [store.record(record, make_job(record)) for record in [*good[:2], poison, *good[2:]]]
    outcomes = await asyncio.gather(*written, return_exceptions=True)
    assert [type(each) for each in outcomes if each is not None] == [RecordRejected]
    assert (
        await count(store, requests) == await count(store, verifications) == await count(store, verification_texts) == 5
    )


async def test_a_job_that_is_refused_leaves_no_row(store: Store) -> None:
    record = make_record(final_tier=1)
    with pytest.raises(RecordRejected):
        await store.record(record, make_job(record, request_id="absent"))
    assert await count(store, requests) == await count(store, verifications) == 0


async def test_claims_are_oldest_first_and_exclusive(store: Store, queue: VerificationQueue) -> None:
    young = await draw_jobs(store, 2, created_at=NOW + timedelta(seconds=5))
    old = await draw_jobs(store, 1, created_at=NOW)
    claims = [await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=5) for _ in range(4)]
    assert claims[3] is None
    ids = [claim.job.verification_id for claim in claims[:3] if claim is not None]
    assert ids[0] == old[0].verification_id
    assert set(ids) == {job.verification_id for job in [*young, *old]}


async def test_a_result_counts_once_and_forgets_the_text(store: Store, queue: VerificationQueue) -> None:
    (job,) = await draw_jobs(store, 1)
    claim = await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=5)
    assert claim is not None
    assert await queue.complete(claim, GOOD, NOW, keep_texts=False)
    assert not await queue.complete(claim, GOOD, NOW, keep_texts=False)
    row = await row_of(store, job)
    assert (row["status"], row["verdict"], row["p_good"], row["scores"]) == ("done", 1, 0.9, {"overlap": 0.5})
    assert (row["cost_nano_usd"], row["compute_s"]) == (1_000_000, 2.0)
    assert await count(store, verification_texts) == 0
    assert await queue.spent_since(NOW - timedelta(seconds=1)) == GOOD.spent
    assert await queue.spent_since(NOW) == NOTHING, "an hour that is over does not count again"
    assert await queue.state() == QueueState()


async def test_texts_stay_where_the_log_keeps_them(store: Store, queue: VerificationQueue) -> None:
    await draw_jobs(store, 1)
    claim = await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=5)
    assert claim is not None
    result = CheckResult(p_good=0.1, grader="compare", grader_version="1", other_answer="six\0")
    assert await queue.complete(claim, result, NOW, keep_texts=True)
    async with store.transaction() as connection:
        kept = (await connection.execute(select(verification_texts))).mappings().one()
    assert (kept["answer"], kept["other_answer"]) == ("5", "six\N{REPLACEMENT CHARACTER}")


async def test_a_dead_workers_job_is_taken_over_and_its_late_result_ignored(
    store: Store, queue: VerificationQueue
) -> None:
    (job,) = await draw_jobs(store, 1)
    dead = await queue.claim("dead", NOW, lease_s=LEASE_S, max_attempts=5)
    assert dead is not None
    assert await queue.claim("other", NOW + timedelta(seconds=LEASE_S - 1), lease_s=LEASE_S, max_attempts=5) is None
    assert await queue.renew(dead, NOW + timedelta(seconds=30), lease_s=LEASE_S)
    assert await queue.claim("other", NOW + timedelta(seconds=LEASE_S + 1), lease_s=LEASE_S, max_attempts=5) is None
    later = NOW + timedelta(seconds=31 + LEASE_S)
    other = await queue.claim("other", later, lease_s=LEASE_S, max_attempts=5)
    assert other is not None
    assert other.num_attempts == 2
    assert not await queue.renew(dead, later, lease_s=LEASE_S)
    assert not await queue.complete(dead, GOOD, later, keep_texts=False)
    assert not await queue.release(dead, Spent())
    assert await queue.complete(other, GOOD, later, keep_texts=False)
    assert (await row_of(store, job))["status"] == "done"


async def test_given_back_is_as_if_untried_but_what_it_cost_stays(store: Store, queue: VerificationQueue) -> None:
    (job,) = await draw_jobs(store, 1)
    for _ in range(3):
        claim = await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=1)
        assert claim is not None
        assert await queue.release(claim, Spent(Decimal("0.002"), 1.5))
    row = await row_of(store, job)
    assert (row["status"], row["num_attempts"], row["cost_nano_usd"]) == ("queued", 0, 6_000_000)
    assert (await queue.spent_since(NOW)).compute_s == 4.5


async def test_a_retry_waits_for_its_time(store: Store, queue: VerificationQueue) -> None:
    await draw_jobs(store, 1)
    claim = await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=5)
    assert claim is not None
    assert await queue.retry(claim, "overloaded", Spent(), NOW + timedelta(seconds=10))
    assert await queue.claim("w", NOW + timedelta(seconds=9), lease_s=LEASE_S, max_attempts=5) is None
    again = await queue.claim("w", NOW + timedelta(seconds=10), lease_s=LEASE_S, max_attempts=5)
    assert again is not None
    assert await queue.fail(again, "no", Spent(), NOW)
    assert await count(store, verification_texts) == 0


async def test_old_and_deadly_jobs_are_given_up(store: Store, queue: VerificationQueue) -> None:
    (old,) = await draw_jobs(store, 1, created_at=NOW - timedelta(days=2))
    (deadly,) = await draw_jobs(store, 1)
    (fresh,) = await draw_jobs(store, 1)
    for _ in range(2):
        held = await queue.claim("dies", NOW, lease_s=-1, max_attempts=2)
        assert held is not None
        assert held.job.verification_id == old.verification_id
    assert (await queue.claim("dies", NOW, lease_s=-1, max_attempts=1)) is not None
    assert await queue.sweep(NOW, max_age_s=86_400, max_attempts=1) == (1, 1)
    assert [(await row_of(store, job))["status"] for job in (old, deadly, fresh)] == ["expired", "failed", "queued"]
    assert await count(store, verification_texts) == 1


async def test_state_and_spending(store: Store, queue: VerificationQueue) -> None:
    await draw_jobs(store, 3)
    assert await queue.claim("w", NOW, lease_s=LEASE_S, max_attempts=5) is not None
    assert await queue.state() == QueueState(2, 1, NOW)
    await store.record(make_record(cost_usd=Decimal("0.5"), measured_cost_usd=Decimal("0.25")))
    await store.record(make_record(cost_usd=Decimal("0.5")))
    await store.record(make_record(cost_usd=Decimal(9), created_at=NOW - timedelta(hours=2)))
    assert await queue.served_since(NOW - timedelta(hours=1)) == Decimal("0.75")


CLAIMER = """
import asyncio, sys
from datetime import UTC, datetime
from gateway.config.store_section import StoreConfig
from gateway.store.store import Store
from gateway.store.verifications import CheckResult, VerificationQueue
async def main():
    async with Store(StoreConfig(url=sys.argv[1], busy_timeout_s=30)) as store:
        queue = VerificationQueue(store)
        while claim := await queue.claim(sys.argv[2], datetime.now(UTC), lease_s=float(sys.argv[3]), max_attempts=99):
            print(claim.job.verification_id, flush=True)
            if len(sys.argv) > 4:
                await asyncio.sleep(3600)
            result = CheckResult(p_good=1.0, grader=sys.argv[2], grader_version="1")
            assert await queue.complete(claim, result, datetime.now(UTC), keep_texts=False)
asyncio.run(main())
"""


async def start_claimer(url: str, name: str, lease_s: float, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLAIMER, url, name, str(lease_s), *more),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_workers_in_several_processes_share_the_jobs_without_doubling(
    store: Store, database_url: str, queue: VerificationQueue
) -> None:
    jobs = await draw_jobs(store, 60)
    workers = [await start_claimer(database_url, f"w{place}", LEASE_S) for place in range(3)]
    outputs = await asyncio.gather(*(worker.communicate() for worker in workers))
    assert [worker.returncode for worker in workers] == [0] * 3, outputs
    done = [line for out, _ in outputs for line in out.decode().split()]
    assert sorted(done) == sorted(job.verification_id for job in jobs)
    assert await count(store, verifications, verifications.c.status == "done") == 60


@pytest.mark.slow
async def test_a_killed_workers_job_is_done_once_by_another(
    store: Store, database_url: str, queue: VerificationQueue
) -> None:
    (job,) = await draw_jobs(store, 1)
    victim = await start_claimer(database_url, "victim", 1.0, "sleep")
    assert victim.stdout is not None
    assert (await victim.stdout.readline()).decode().strip() == job.verification_id
    victim.send_signal(signal.SIGKILL)
    await victim.communicate()
    assert (await row_of(store, job))["status"] == "running"
    while (await row_of(store, job))["status"] != "done":
        heir = await start_claimer(database_url, "heir", LEASE_S)
        _, errors = await heir.communicate()
        assert heir.returncode == 0, errors
    row = await row_of(store, job)
    assert (row["grader"], row["num_attempts"]) == ("heir", 2)
