"""What the administration reads equals the definition over the rows: filters, pages, sums and states."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import product
from typing import Any

from sqlalchemy import insert, update

from gateway.ids import uuid7
from gateway.store.admin_queries import AdminQueries, RequestFilter
from gateway.store.control_records import Alert
from gateway.store.records import ApiKey, PolicyVersion, RequestRecord, VerificationJob
from gateway.store.rows import clean_text
from gateway.store.store import Store
from gateway.store.tables import admin_audit, alerts, evaluations, policy_versions, retrain_runs, verifications
from tests.gateway.records import make_record

MIDNIGHT = datetime(2026, 3, 4, tzinfo=UTC)
HOUR = timedelta(hours=1)
ODD = "a\0b"  # no database keeps it as it is


def a_record(rng: random.Random) -> RequestRecord:
    return make_record(
        created_at=MIDNIGHT + rng.randrange(-6, 6) * HOUR,
        tenant=rng.choice(["a", ODD]),
        key_id=rng.choice([None, "k1", "k2"]),
        policy_name=rng.choice(["p", "q"]),
        router_version=rng.choice(["r", "s"]),
        final_tier=rng.choice([None, 1, 2]),
        model_served=rng.choice(["m", "n"]),
        reason=rng.choice(["sufficient", "novel"]),
        status_code=rng.choice([200, 503]),
        error_code=rng.choice([None, "model_failed"]),
        session_id=rng.choice([None, ODD, "s"]),
        num_choices=rng.randrange(1, 4),
        prompt_tokens=rng.randrange(50),
        completion_tokens=rng.randrange(50),
        cached_tokens=rng.randrange(50),
        cost_usd=Decimal(rng.randrange(9)) / 10**9,
        measured_cost_usd=rng.choice([None, Decimal(3) / 10**9]),
        compute_s=rng.choice([None, 0.5]),
    )


async def logged(store: Store, num: int = 60) -> list[RequestRecord]:
    """Put rows into the log; return them newest first, texts as databases keep them."""
    rng = random.Random(3)
    records = [a_record(rng) for _ in range(num)]
    await asyncio.gather(*(store.record(each) for each in records))
    kept = [
        replace(each, tenant=clean_text(each.tenant), session_id=each.session_id and clean_text(each.session_id))
        for each in records
    ]
    return sorted(kept, key=lambda each: each.request_id, reverse=True)


COLUMN_OF = {"policy": "policy_name", "tier": "final_tier", "status": "status_code"}
FILTERS: list[dict[str, Any]] = [
    {},
    *({name: value} for name, value in (("tenant", ODD), ("key_id", "k1"), ("policy", "q"), ("tier", 2))),
    *({name: value} for name, value in (("reason", "novel"), ("status", 503), ("session_id", ODD))),
    {"router_version": "s", "tenant": "a"},
    {"since": MIDNIGHT},
    {"until": MIDNIGHT, "tier": 1},
    {"since": MIDNIGHT, "until": MIDNIGHT + 4 * HOUR},
    {"since": MIDNIGHT - 30 * HOUR, "until": MIDNIGHT + 30 * HOUR, "status": 200, "reason": "novel"},
]


def matches(record: RequestRecord, wanted: dict[str, Any]) -> bool:
    for name, value in wanted.items():
        if name == "since":
            fits = record.created_at >= value
        elif name == "until":
            fits = record.created_at < value
        else:
            fits = getattr(record, COLUMN_OF.get(name, name)) == (clean_text(value) if value == ODD else value)
        if not fits:
            return False
    return True


async def test_filters_and_pages_select_what_they_say(store: Store) -> None:
    records, queries = await logged(store), AdminQueries(store)
    for wanted in FILTERS:
        which = RequestFilter(**wanted)
        expected = [each for each in records if matches(each, wanted)]
        assert expected, "nothing of this would be tested otherwise"
        assert await queries.requests(which, limit=1000, before_id=None) == expected
        first = await queries.requests(which, limit=2, before_id=None)
        second = await queries.requests(which, limit=2, before_id=first[-1].request_id)
        assert first + second == expected[:4]


GROUPS = {
    "day": lambda r: r.created_at.date().isoformat(),
    "tenant": lambda r: r.tenant,
    "key": lambda r: r.key_id,
    "tier": lambda r: r.final_tier,
    "policy": lambda r: r.policy_name,
    "model": lambda r: r.model_served,
}


ROUTED = ("num_choices", "prompt_tokens", "completion_tokens", "cached_tokens")


def usage_of(records: list[RequestRecord], group_by: tuple[str, ...]) -> dict[tuple[Any, ...], Counter[str]]:
    """Return the definition of the usage report: key of each group -> its sums."""
    sums: dict[tuple[Any, ...], Counter[str]] = {} if group_by else {(): Counter()}
    for each in records:
        row: Any = sums.setdefault(tuple(GROUPS[name](each) for name in group_by), Counter())
        row["num_requests"] += 1
        row["num_failed"] += each.error_code is not None
        row["cost_nano_usd"] += int(each.cost_usd * 10**9)
        row["measured_cost_nano_usd"] += int((each.measured_cost_usd or 0) * 10**9)
        row["compute_s"] += each.compute_s or 0.0
        for name in ROUTED:
            row[name] += getattr(each, name)
            row[f"routed_{name.removeprefix('num_')}"] += getattr(each, name) * (each.final_tier is not None)
    return sums


async def test_usage_is_summed_by_group(store: Store) -> None:
    records, queries = await logged(store), AdminQueries(store)
    groups: list[tuple[str, ...]] = [(), ("day",), ("tenant", "key"), ("tier",), ("policy", "tier", "model")]
    for group_by, wanted in product(groups, FILTERS):
        sums = usage_of([each for each in records if matches(each, wanted)], group_by)
        found = await queries.usage(RequestFilter(**wanted), group_by)
        keys = [tuple(row[name] for name in group_by) for row in found]
        assert keys == sorted(sums, key=lambda key: [(part is None, part) for part in key])
        for key, row in zip(keys, found, strict=True):
            numbers = {name: value for name, value in row.items() if name not in group_by}
            assert numbers == {name: sums[key][name] for name in numbers}
            assert set(sums[key]) <= set(numbers)


async def put_check(store: Store, record: RequestRecord, direction: str, **columns: Any) -> str:
    """Put a check of a request into the log; returns its id."""
    job = VerificationJob(
        verification_id=uuid7(),
        request_id=record.request_id,
        created_at=record.created_at,
        direction="up" if direction == "up" else "down",
        tier=2,
        against_tier=3 if direction == "up" else 1,
        inclusion_probability=0.5,
        stratum="",
        prompt="{}",
        answer="",
    )
    async with store.transaction() as connection:
        names = [column.name for column in verifications.c]
        values = {name: getattr(job, name) for name in names if hasattr(job, name)}
        values |= {"status": "queued", "num_attempts": 0, "scores": {}, "cost_nano_usd": 0, **columns}
        await connection.execute(insert(verifications).values(**values))
    return job.verification_id


async def test_what_the_checks_of_requests_said(store: Store) -> None:
    records, queries = await logged(store, 5), AdminQueries(store)
    good, bad, both, waiting, never = records
    up = await put_check(store, good, "up", status="done", verdict=1, p_good=0.75, cost_nano_usd=5)
    await put_check(store, bad, "up", status="done", verdict=0, p_good=0.25, cost_nano_usd=7)
    await put_check(store, both, "up", status="done", verdict=0, p_good=None)
    await put_check(store, both, "down", status="done", verdict=1, p_good=1.0)
    await put_check(store, waiting, "up")
    ids = [each.request_id for each in records]
    states = {good.request_id: "good", bad.request_id: "not_good", both.request_id: "not_good"}
    assert await queries.check_states(ids) == states | {waiting.request_id: "queued"}
    assert await queries.check_states(ids[:1]) == {good.request_id: "good"}
    assert await queries.check_states([]) == {}
    verdicts = {row["request_id"]: (row["p_good"], row["inclusion_probability"]) for row in await queries.verdicts(ids)}
    assert verdicts == {good.request_id: (0.75, 0.5), bad.request_id: (0.25, 0.5)}
    checks, reports, labels = await queries.of_request(good.request_id)
    assert ([row["verification_id"] for row in checks], reports, labels) == ([up], [], [])
    assert await queries.of_request(never.request_id) == ([], [], [])
    assert await queries.verification_cost(None, None) == 12
    assert await queries.checks_by_status(None, None) == {"done": 4, "queued": 1}


async def test_checks_count_by_the_time_of_their_requests(store: Store) -> None:
    queries = AdminQueries(store)
    assert await queries.verification_cost(None, None) == 0
    for place, status in enumerate(("done", "done", "failed")):
        record = make_record(created_at=MIDNIGHT + place * HOUR)
        await store.record(record)
        await put_check(store, record, "up", status=status, cost_nano_usd=10**place)
    spans = [
        (MIDNIGHT, MIDNIGHT + HOUR),
        (MIDNIGHT, MIDNIGHT + 2 * HOUR),
        (MIDNIGHT + HOUR, None),
        (None, MIDNIGHT + HOUR),
    ]
    assert [await queries.verification_cost(*span) for span in spans] == [1, 11, 110, 1]
    assert await queries.checks_by_status(*spans[1]) == {"done": 2}
    assert await queries.checks_by_status(*spans[2]) == {"done": 1, "failed": 1}


async def test_listings_are_newest_first_by_page_and_by_column(store: Store) -> None:
    queries = AdminQueries(store)
    ids = sorted(uuid7() for _ in range(4))[::-1]
    run = {"created_at": MIDNIGHT, "reason": "", "status": "done", "stage": "", "progress": 1.0, "holder": ""}
    async with store.transaction() as connection:
        for place, each in enumerate(ids):
            kind = ["odd", clean_text(ODD)][place % 2]
            made = {"evaluation_id": each, "created_at": MIDNIGHT, "kind": kind, "subject": "", "body": {}}
            done = {
                "audit_id": each,
                "created_at": MIDNIGHT,
                "action": kind,
                "subject": "",
                "status": 200,
                "remote": "",
            }
            await connection.execute(insert(evaluations).values(made))
            await connection.execute(insert(admin_audit).values(done))
            await connection.execute(insert(retrain_runs).values(run | {"run_id": each, "trigger": kind}))
    pages: Any = [
        (queries.evaluations, "evaluation_id", "kind"),
        (queries.audit, "audit_id", "action"),
        (queries.retrain_runs, "run_id", "trigger"),
    ]
    for read, name, column in pages:

        async def listed(equal: Any, read: Any = read, name: str = name, **page: Any) -> list[str]:
            return [row[name] for row in await read(equal, **{"limit": 10, "before_id": None} | page)]

        assert await listed({}) == ids
        assert await listed({column: None}) == ids
        assert await listed({column: ODD}) == ids[1::2]
        assert await listed({}, limit=3) == ids[:3]
        assert await listed({}, before_id=ids[1]) == ids[2:]
    for read_one, name in ((queries.evaluation, "evaluation_id"), (queries.retrain_run, "run_id")):
        found = await read_one(ids[2])
        assert found is not None
        assert found[name] == ids[2]
        assert await read_one("nobody") is None


async def test_checks_are_listed_by_their_columns(store: Store) -> None:
    queries = AdminQueries(store)
    record = make_record()
    await store.record(record)
    ids = [await put_check(store, record, direction) for direction in ("up", "down")]
    found = await queries.verifications({"direction": "down"}, limit=10, before_id=None)
    assert [row["verification_id"] for row in found] == ids[1:]


async def test_alerts_by_state_kind_and_page(store: Store) -> None:
    queries = AdminQueries(store)
    ids = sorted(uuid7() for _ in range(4))
    shared: dict[str, Any] = {"created_at": MIDNIGHT, "severity": "warning", "subject": "", "body": {}}
    kept = [Alert(alert_id=each, kind=["drift", "floor"][place % 2], **shared) for place, each in enumerate(ids)][::-1]
    async with store.transaction() as connection:
        for each in kept:
            await connection.execute(insert(alerts).values(alert_id=each.alert_id, kind=each.kind, **shared))
        await connection.execute(update(alerts).where(alerts.c.alert_id == ids[0]).values(resolved_at=MIDNIGHT))
    kept[-1] = replace(kept[-1], resolved_at=MIDNIGHT)
    every: Any = {"only_open": False, "kind": None, "limit": 10, "before_id": None}
    assert await queries.alerts(**every) == kept
    assert await queries.alerts(**every | {"only_open": True}) == kept[:3]
    assert await queries.alerts(**every | {"kind": "drift"}) == kept[1::2]
    assert await queries.alerts(**every | {"limit": 1}) == kept[:1]
    assert await queries.alerts(**every | {"before_id": kept[0].alert_id}) == kept[1:]


async def test_policies_and_their_versions(store: Store) -> None:
    queries = AdminQueries(store)
    versions = [
        PolicyVersion(name=name, version=version, created_at=MIDNIGHT + hours * HOUR, body={"n": hours})
        for name, version, hours in (("q", "2", 0), ("p", "1", 1), ("p", "2", 2), ("p", "3", 2))
    ]
    async with store.transaction() as connection:
        for each in versions:
            values = {name: getattr(each, name) for name in ("name", "version", "created_at", "body")}
            await connection.execute(insert(policy_versions).values(**values, author="", note=""))
    assert await queries.policy_versions("p") == [versions[2], versions[3], versions[1]]
    assert await queries.policy_versions("nobody") == []
    assert await queries.policy_names() == ["p", "q"]


async def test_a_revoked_administrator_counts_as_one(store: Store) -> None:
    queries = AdminQueries(store)
    key = ApiKey(key_id="k", name="n", key_hash="h", prefix="p", created_at=MIDNIGHT)
    await store.insert_key(key)
    assert await queries.key("k") == key
    assert await queries.key("nobody") is None
    assert not await queries.had_admin_key()
    await store.insert_key(replace(key, key_id="admin", key_hash="i", scope="admin"))
    await store.revoke_key("admin", MIDNIGHT)
    assert await queries.had_admin_key()
