"""Sums from daily roll-ups equal those of the rows, whatever comes late, goes or is read meanwhile (review M15)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import event, func, select, text

from gateway.config.store_section import StoreConfig
from gateway.store.admin_queries import AdminQueries, RequestFilter
from gateway.store.erasure import Eraser, ErasureTarget
from gateway.store.errors import StoreUnavailable
from gateway.store.monitoring import MonitorReader
from gateway.store.pruning import LogPruner
from gateway.store.records import RequestRecord
from gateway.store.rollups import DIMENSIONS, MEASURES, DayFolder, Span, UsageSums
from gateway.store.store import Store
from gateway.store.tables import daily_usage, requests, usage_days
from tests.gateway.records import make_record

FIRST = datetime(2026, 1, 30, tzinfo=UTC)
NOW = FIRST + timedelta(days=5)
# On both sides of midnight, and of the hour that sums are read by.
EDGES = [timedelta(0), timedelta(microseconds=1), timedelta(days=1, microseconds=-1), timedelta(hours=1)]


@asynccontextmanager
async def two_servers(url: str) -> AsyncIterator[tuple[Store, Store]]:
    async with Store(StoreConfig(url=url)) as one, Store(StoreConfig(url=url)) as other:
        yield one, other


def a_request(rng: random.Random) -> RequestRecord:
    offset = rng.choice(EDGES) if rng.random() < 0.5 else timedelta(seconds=rng.randrange(86_400))
    return make_record(
        created_at=FIRST + timedelta(days=rng.randrange(4)) + offset,
        tenant=rng.choice(["a", "b"]),
        key_id=rng.choice([None, "k1", "k2"]),
        policy_name=rng.choice(["p", "q"]),
        policy_version="1",
        router_version="r",
        domain=rng.choice(["", "law"]),
        final_tier=rng.choice([None, 1, 2]),
        model_served=rng.choice([None, "m"]),
        error_code=rng.choice([None, None, "model_failed"]),
        num_choices=rng.randrange(1, 3),
        prompt_tokens=rng.randrange(100),
        completion_tokens=rng.choice([0, 2**31 - 1]),
        cost_usd=Decimal(rng.randrange(10**6)) / 10**9,
        measured_cost_usd=rng.choice([None, Decimal(rng.randrange(10**6)) / 10**9]),
        compute_s=rng.choice([None, 0.25, 1.5]),
        verify_probability=rng.choice([None, 0.0, 0.1, 0.5, 1.0]),
    )


async def naive(store: Store, span: Span, group_by: Sequence[str]) -> dict[Any, dict[str, Any]]:
    """The definition, row by row."""
    async with store.transaction() as connection:
        rows = [dict(row) for row in (await connection.execute(select(requests))).mappings()]
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        at = row["created_at"]
        if (span.since is not None and at < span.since) or (span.until is not None and at >= span.until):
            continue
        key = tuple(at.date().isoformat() if name == "day" else row[name] for name in group_by)
        sums = found.setdefault(key, dict.fromkeys(MEASURES, 0) | {"least_probability": None, "compute_s": 0.0})
        sums["num_requests"] += 1
        sums["num_failed"] += row["error_code"] is not None
        for name in ("num_choices", "prompt_tokens", "completion_tokens", "cost_nano_usd"):
            sums[name] += row[name]
        measured = row["measured_cost_nano_usd"]
        sums["measured_cost_nano_usd"] += measured or 0
        sums["serving_cost_nano_usd"] += row["cost_nano_usd"] if measured is None else measured
        sums["compute_s"] += row["compute_s"] or 0.0
        chance = row["verify_probability"]
        if chance:
            sums["num_drawable"] += 1
            sums["least_probability"] = min(chance, sums["least_probability"] or 1.0)
        sums["num_undrawable"] += chance == 0.0
    return found


async def assert_equal(store: Store, rng: random.Random) -> None:
    moments = [None, FIRST, FIRST + timedelta(days=1), FIRST + timedelta(days=2, hours=7), NOW]
    since, until = rng.choice(moments[:4]), rng.choice(moments)
    if since is not None and until is not None and until <= since:
        until = None
    for group_by in ((), ("day",), ("day", "tenant"), ("policy_name", "final_tier"), DIMENSIONS):
        expected = await naive(store, Span(since, until), group_by)
        if not group_by:
            expected = expected or {(): dict.fromkeys(MEASURES, 0) | {"least_probability": None}}
        assert await UsageSums(store).read(Span(since, until), group_by) == expected, (since, until, group_by)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_sums_are_those_of_the_rows_at_every_moment(database_url: str, seed: int) -> None:
    """Late rows, deleted rows, erased rows, borders of days, two servers that write and two that fold."""
    rng = random.Random(seed)
    num_folded = 0
    async with two_servers(database_url) as servers:
        for _ in range(40):
            store = rng.choice(servers)
            match rng.choice(["write", "write", "fold", "fold", "prune", "erase", "read"]):
                case "write":
                    for _ in range(rng.randrange(1, 6)):
                        await store.record(a_request(rng))
                case "fold":
                    num_folded += await DayFolder(store).fold_next(NOW) is not None
                case "prune" if rng.random() < 0.3:
                    await LogPruner(store).rows(FIRST + timedelta(hours=rng.randrange(60)))
                case "erase" if rng.random() < 0.3:
                    await Eraser(store).erase(ErasureTarget(key_id=rng.choice(["k1", "k2"])))
                case "read":
                    await assert_equal(rng.choice(servers), rng)
        while await DayFolder(servers[0]).fold_next(NOW) is not None:
            num_folded += 1
        await assert_equal(servers[1], rng)
    assert num_folded >= 4, "nothing of this would be tested otherwise"


@pytest.mark.parametrize("what", ["a late row", "a deleted row", "a changed row"])
async def test_a_day_that_changes_while_it_is_summed_up_is_not_called_exact(store: Store, what: str) -> None:
    rng = random.Random(0)
    records = [a_request(rng) for _ in range(20)]
    for each in records:
        await store.record(each)
    folder = DayFolder(store)
    day = max(each.created_at for each in records).date()
    noon = datetime.combine(day, datetime.min.time(), UTC) + timedelta(hours=12)
    statements = {
        "a deleted row": text("DELETE FROM requests WHERE request_id = :id"),
        "a changed row": text("UPDATE requests SET prompt_tokens = 7 WHERE request_id = :id"),
    }
    done: list[bool] = []

    # Between the mark and the sums: another connection changes a row of the day.
    async def change() -> None:
        if what == "a late row":
            await store.record(make_record(created_at=noon))
            return
        of_day = next(each for each in records if each.created_at.date() == day)
        async with store.transaction() as connection:
            await connection.execute(statements[what], {"id": of_day.request_id})

    reading = store.reading

    @asynccontextmanager
    async def reading_and_changing() -> AsyncIterator[Any]:
        async with reading() as connection:
            yield connection
        async with store.transaction() as connection:
            is_marked = (await connection.execute(select(func.count()).select_from(usage_days))).scalar()
        if is_marked and not done:
            done.append(True)
            await change()

    store.reading = reading_and_changing  # type: ignore[method-assign]
    assert await folder.fold_next(NOW) == day
    store.reading = reading  # type: ignore[method-assign]
    assert done
    async with store.transaction() as connection:
        complete = select(func.count()).select_from(usage_days).where(usage_days.c.is_complete)
        assert (await connection.execute(complete)).scalar() == 0
        kept = select(func.count()).select_from(daily_usage)
        assert (await connection.execute(kept)).scalar() == 0, "its sums are no use to anybody"
    await assert_equal(store, rng)
    assert await folder.fold_next(NOW) == day
    await assert_equal(store, rng)


async def test_a_folded_day_costs_no_row(store: Store) -> None:
    """What a report reads of a day that is over are its sums."""
    rng = random.Random(0)
    for _ in range(30):
        await store.record(a_request(rng))
    while await DayFolder(store).fold_next(NOW) is not None:
        pass
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(store._reports.sync_engine, "before_cursor_execute", note)
    span = Span(FIRST, FIRST + timedelta(days=4))
    assert sum(each["num_requests"] for each in (await UsageSums(store).read(span, ("tenant",))).values()) == 30
    assert not [each for each in statements if "FROM requests" in each]
    async with store.transaction() as connection:
        days = (await connection.execute(select(daily_usage.c.day).distinct())).scalars().all()
    assert all(isinstance(each, date) for each in days)


async def test_reports_and_the_watch_read_the_same_from_sums(store: Store) -> None:
    """Before and after the days are summed up."""
    rng = random.Random(7)
    for _ in range(60):
        await store.record(a_request(rng))

    async def reports() -> list[Any]:
        queries, reader = AdminQueries(store), MonitorReader(store)
        found: list[Any] = [
            await queries.usage(RequestFilter(tenant="a", since=FIRST + timedelta(hours=5)), names)
            for names in (("day",), ("day", "tier", "model"), ("tenant", "key", "policy"), ())
        ]
        found.append(await queries.usage(RequestFilter(session_id="nobody"), ()))
        found.append(await queries.serving_cost(FIRST, None))
        found.append(await reader.traffic(FIRST + timedelta(hours=5)))
        found.append(await reader.traffic_of("tenant", ["a"], FIRST))
        found.append(await reader.traffic_of("domain", ["law", "unknown"], FIRST))
        return found

    before = await reports()
    while await DayFolder(store).fold_next(NOW) is not None:
        pass
    assert await reports() == before


async def test_today_is_not_summed_up(store: Store) -> None:
    await store.record(make_record(created_at=datetime.now(UTC)))
    assert await DayFolder(store).fold_next() is None


async def test_reports_have_a_timeout_of_their_own(database_url: str) -> None:
    config = StoreConfig(url=database_url, write_timeout_s=15.0, report_timeout_s=0.1)
    async with Store(config) as store:
        numbers = "SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000000"
        slow = f"WITH RECURSIVE n(i) AS ({numbers}) SELECT count(*) FROM n"
        with pytest.raises(StoreUnavailable):
            async with store.reading() as connection:
                await connection.execute(text(slow))
        await store.ping()


async def test_the_triggers_are_there_after_every_migration(database_url: str, store: Store) -> None:
    """A later migration that copies the table in SQLite would drop them without a word."""
    names = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
    if store.dialect == "postgresql":
        names = "SELECT tgname FROM pg_trigger WHERE tgrelid = 'requests'::regclass AND NOT tgisinternal"
    async with store.transaction() as connection:
        found = {row[0] for row in await connection.execute(text(names))}
    assert len([each for each in found if each.startswith("usage_day")]) == (3 if store.dialect == "sqlite" else 4)
