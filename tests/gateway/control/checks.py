"""Requests with finished checks, written as the gateway and the worker write them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import insert, update

from classifier.types import TierSufficiency
from gateway.ids import uuid7
from gateway.store.records import VerificationJob
from gateway.store.store import Store
from gateway.store.tables import gold_labels, verifications
from tests.gateway.records import make_record


@dataclass(frozen=True)
class Check:
    """One request at a tier below the top; ``p_good`` None for one that was not drawn."""

    p_good: float | None = None
    tier: int = 1
    inclusion: float = 1.0
    p_as_good: float = 0.9
    direction: str = "up"
    tenant: str = "default"
    domain: str = ""
    gold: float | None = None
    reason: str = "sufficient"


async def put_checks(
    store: Store,
    checks: Iterable[Check],
    *,
    policy: tuple[str, str],
    router_version: str = "none",
    top: int = 2,
    at: datetime | None = None,
) -> None:
    """Commit the rows, and the results of their checks, each a millisecond after the one before."""
    at = at or datetime.now(UTC)
    results: list[tuple[str, float, datetime]] = []
    labels: list[dict[str, Any]] = []
    writes = []
    for place, check in enumerate(checks):
        record = make_record(
            created_at=at,
            tenant=check.tenant,
            domain=check.domain,
            policy_name=policy[0],
            policy_version=policy[1],
            router_version=router_version,
            decided_tier=check.tier,
            final_tier=check.tier,
            reason=check.reason,
            sufficiency=tuple(TierSufficiency(t, 0.9, check.p_as_good if t < top else 1.0) for t in range(1, top + 1)),
            verify_probability=check.inclusion,
        )
        job = None
        if check.p_good is not None:
            job = VerificationJob(
                verification_id=uuid7(),
                request_id=record.request_id,
                created_at=at,
                direction="up" if check.direction == "up" else "down",
                tier=check.tier,
                against_tier=top if check.direction == "up" else check.tier - 1,
                inclusion_probability=check.inclusion,
                stratum="",
                prompt="{}",
                answer="",
                tenant=check.tenant,
                domain=check.domain,
                policy_name=policy[0],
                policy_version=policy[1],
                router_version=router_version,
            )
            results.append((job.verification_id, check.p_good, at + timedelta(milliseconds=place)))
        if check.gold is not None:
            # The dear answer is known to be right, so a wrong cheap one is a fault.
            for tier, label in ((check.tier, check.gold), (top, 1.0)):
                labels.append(
                    {
                        "gold_id": uuid7(),
                        "request_id": record.request_id,
                        "tier": tier,
                        "source": "admin",
                        "label": label,
                        "created_at": at,
                        "note": "",
                    }
                )
        writes.append(store.record(record, job))
    await asyncio.gather(*writes)
    async with store.transaction() as connection:
        for verification_id, p_good, finished_at in results:
            done = {"status": "done", "p_good": p_good, "verdict": int(p_good >= 0.5), "finished_at": finished_at}
            wanted = update(verifications).where(verifications.c.verification_id == verification_id)
            await connection.execute(wanted.values(**done, grader="test", grader_version="1"))
        if labels:
            await connection.execute(insert(gold_labels), labels)
