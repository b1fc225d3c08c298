"""Drawn answers in a store, for tests that need a queue with something in it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gateway.ids import uuid7
from gateway.store.records import RequestRecord, VerificationJob
from gateway.store.store import Store
from tests.gateway.records import NOW, make_record


def make_job(record: RequestRecord, **changes: Any) -> VerificationJob:
    """A cheap answer of tier 1, to be checked against tier 2."""
    fields: dict[str, Any] = {
        "verification_id": uuid7(),
        "request_id": record.request_id,
        "created_at": record.created_at,
        "direction": "up",
        "tier": 1,
        "against_tier": 2,
        "inclusion_probability": 0.05,
        "stratum": "0.9-0.98",
        "prompt": '{"messages":[["user","What is 2 plus 3?",null]]}',
        "answer": "5",
        "sampling": {"max_tokens": 32},
        "policy_name": "default",
    }
    return VerificationJob(**(fields | changes))


async def draw_jobs(store: Store, num: int, *, created_at: datetime = NOW, **changes: Any) -> list[VerificationJob]:
    """Requests whose answers were drawn, committed with their jobs."""
    jobs = []
    for _ in range(num):
        record = make_record(final_tier=1, created_at=created_at)
        jobs.append(make_job(record, **changes))
        await store.record(record, jobs[-1])
    return jobs
