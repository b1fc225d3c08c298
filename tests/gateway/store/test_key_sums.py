"""Accounts begin after a start with exactly what the log holds of their key or policy since a moment."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

from gateway.config.store_section import StoreConfig
from gateway.ids import uuid7
from gateway.store.key_sums import KeySum, KeySums
from gateway.store.store import Store
from gateway.store.tables import feedback
from tests.gateway.records import NOW, make_record

SINCE = NOW - timedelta(hours=1)


async def test_rows_of_others_and_of_before_do_not_count(database_url: str) -> None:
    mine = {"key_id": "mine", "policy_name": "p", "prompt_tokens": 3, "completion_tokens": 4}
    rows = [
        make_record(**mine, created_at=SINCE, cost_usd=Decimal("0.000000005")),
        make_record(**mine, created_at=NOW, cost_usd=Decimal("0.000000006")),
        make_record(**mine, created_at=SINCE - timedelta(microseconds=1), cost_usd=Decimal(1)),
        make_record(key_id="other", policy_name="q", prompt_tokens=100, cost_usd=Decimal(2)),
    ]
    async with Store(StoreConfig(url=database_url)) as store:
        for row in rows:
            await store.record(row)
        sums = KeySums(store)
        assert await sums.since("mine", SINCE) == KeySum(2, 14, 11)
        assert await sums.since_by_policy("p", SINCE) == KeySum(2, 14, 11)
        assert await sums.since("other", SINCE) == KeySum(1, 100, 2 * 10**9)
        assert await sums.since("nobody", SINCE) == KeySum(0, 0, 0)


async def test_reports_count_as_requests_of_the_key_that_gave_them(database_url: str) -> None:
    row = make_record(key_id="asker", created_at=NOW)
    report = {"request_id": row.request_id, "tenant": row.tenant, "kind": "rating", "value": 1.0, "metadata": {}}
    async with Store(StoreConfig(url=database_url)) as store:
        await store.record(row)
        async with store.transaction() as connection:
            for created_at in (SINCE, NOW, SINCE - timedelta(seconds=1)):
                name = uuid7()
                values = {"feedback_id": name, "idempotency_key": name, "created_at": created_at, "key_id": "reporter"}
                await connection.execute(feedback.insert().values(**report, **values))
        assert (await KeySums(store).since("reporter", SINCE)).num_requests == 2
        assert (await KeySums(store).since("asker", SINCE)).num_requests == 1
