"""Group commit: durable when told so, shared when busy, immediate when idle, fair when one row is bad."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.config.store_section import StoreConfig
from gateway.store.committer import GroupCommitter
from gateway.store.errors import RecordRejected, StoreClosed, StoreOverloaded, StoreUnavailable
from gateway.store.records import ApiKey, RequestRecord
from gateway.store.rows import EncodedRecord, EncodeTime, sqlite_time
from gateway.store.sinks import connect_sqlite
from gateway.store.store import Store
from gateway.store.translate import RowFault
from tests.gateway.raw import PATIENCE_S
from tests.gateway.records import NOW, make_record


def make_poison() -> RequestRecord:
    """A row that passes our encoding and that either database refuses: it belongs to no tenant."""
    return make_record(tenant=None)


async def stored_ids(url: str) -> set[str]:
    """The ids another connection sees: only committed rows."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(Path(url.removeprefix("sqlite:///")))
        try:
            return {row[0] for row in connection.execute("SELECT request_id FROM requests")}
        finally:
            connection.close()
    postgres = await asyncpg.connect(url)
    try:
        return {row["request_id"] for row in await postgres.fetch("SELECT request_id FROM requests")}
    finally:
        await postgres.close()


async def test_recorded_means_committed(store: Store, database_url: str) -> None:
    for _ in range(5):
        record = make_record(session_id="s", final_tier=1, prompt_text="p")
        await store.record(record)
        assert record.request_id in await stored_ids(database_url)


async def test_idle_rows_do_not_wait_for_company(store: Store) -> None:
    for _ in range(5):
        await store.record(make_record())
    assert store.committer.num_commits == store.committer.num_rows == 5


async def test_concurrent_rows_share_commits(store: Store) -> None:
    records = [make_record() for _ in range(400)]
    await asyncio.gather(*(store.record(record) for record in records))
    assert store.committer.num_rows == 400
    # The first row goes alone; the others arrived in the same turn of the loop and share.
    assert store.committer.num_commits <= 3
    assert {record.request_id for record in await store.recent(limit=1000)} == {r.request_id for r in records}


async def test_batches_are_bounded(database_url: str) -> None:
    async with Store(StoreConfig(url=database_url, max_batch_records=10)) as store:
        await asyncio.gather(*(store.record(make_record()) for _ in range(101)))
        assert store.committer.num_commits >= 11
        assert store.committer.num_rows == 101


async def test_a_poison_row_fails_alone(store: Store, database_url: str) -> None:
    good = [make_record(session_id=str(place), final_tier=1, prompt_text="p") for place in range(60)]
    poison = [make_poison(), make_poison()]
    mixed = [*good[:7], poison[0], *good[7:40], poison[1], *good[40:]]
    outcomes = await asyncio.gather(*(store.record(record) for record in mixed), return_exceptions=True)
    for record, outcome in zip(mixed, outcomes, strict=True):
        if record in poison:
            assert isinstance(outcome, RecordRejected)
            assert outcome.request_id == record.request_id
        else:
            assert outcome is None
    assert await stored_ids(database_url) == {record.request_id for record in good}
    await store.record(make_record())


async def test_a_row_that_cannot_be_encoded_fails_alone(store: Store) -> None:
    broken = make_record(cost_usd="a lot")
    good = make_record()
    outcomes = await asyncio.gather(store.record(broken), store.record(good), return_exceptions=True)
    assert isinstance(outcomes[0], RecordRejected)
    assert outcomes[1] is None


async def test_a_cancelled_caller_does_not_lose_the_row(store: Store, database_url: str) -> None:
    records = [make_record() for _ in range(20)]
    tasks = [asyncio.create_task(store.record(record)) for record in records]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.record(make_record())
    assert {record.request_id for record in records} <= await stored_ids(database_url)


async def test_closing_commits_what_waits(database_url: str) -> None:
    store = await Store(StoreConfig(url=database_url, max_batch_records=5)).open()
    records = [make_record() for _ in range(50)]
    tasks = [asyncio.create_task(store.record(record)) for record in records]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*tasks) == [None] * 50
    assert await stored_ids(database_url) == {record.request_id for record in records}


class ScriptedSink:
    """A sink in memory that refuses listed rows and whole batches with one of them in, as a database does."""

    def __init__(self, poison: frozenset[int] = frozenset()) -> None:
        self.encode_time: EncodeTime = sqlite_time
        self.poison = poison
        self.written: list[int] = []
        self.num_writes = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def write(self, batch: Sequence[EncodedRecord], *, again: bool) -> None:
        self.num_writes += 1
        await self.gate.wait()
        places = [int(entry.request_id) for entry in batch]
        if self.poison.intersection(places):
            raise RowFault("bad value")
        self.written += places

    is_connected = True

    async def probe(self) -> None:
        await self.write([], again=False)

    def is_lost(self, error: BaseException) -> bool:
        return False

    async def drop(self) -> None: ...

    async def close(self) -> None: ...


class BreakingSink(ScriptedSink):
    """One whose connection breaks when told to, and is of no use until it was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.num_breaks = 0
        self.is_broken = False

    async def write(self, batch: Sequence[EncodedRecord], *, again: bool) -> None:
        assert not self.is_broken, "a dead connection is not used again"
        if self.num_breaks:
            self.num_breaks -= 1
            self.is_broken = True
            raise ConnectionResetError("gone")
        await super().write(batch, again=again)

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionResetError)

    async def drop(self) -> None:
        self.is_broken = False


def make_entry(place: int) -> EncodedRecord:
    return EncodedRecord(str(place), (), None, None, None)


@pytest.fixture
async def sink() -> ScriptedSink:
    return ScriptedSink()


@pytest.fixture
async def committer(sink: ScriptedSink) -> AsyncIterator[GroupCommitter]:
    made = GroupCommitter(sink, shown="memory", max_pending=8, max_batch=4)
    made.start()
    yield made
    sink.gate.set()
    await made.close(5)


@given(size=st.integers(1, 40), data=st.data())
@settings(max_examples=60, deadline=None)
async def test_every_row_ends_once_and_in_order(size: int, data: st.DataObject) -> None:
    poison = data.draw(st.frozensets(st.integers(0, size - 1)))
    sink = ScriptedSink(poison)
    committer = GroupCommitter(sink, shown="memory", max_pending=size, max_batch=16)
    committer.start()
    outcomes = await asyncio.gather(
        *(committer.commit(make_entry(place)) for place in range(size)), return_exceptions=True
    )
    await committer.close(5)
    rejected = {place for place, outcome in enumerate(outcomes) if isinstance(outcome, RecordRejected)}
    assert rejected == poison
    assert all(outcome is None for place, outcome in enumerate(outcomes) if place not in poison)
    assert sink.written == [place for place in range(size) if place not in poison]
    assert committer.num_rows + committer.num_failed == size


async def test_one_bad_row_of_many_costs_a_logarithm(sink: ScriptedSink) -> None:
    sink.poison = frozenset({300})
    committer = GroupCommitter(sink, shown="memory", max_pending=512, max_batch=512)
    committer.start()
    await asyncio.gather(*(committer.commit(make_entry(place)) for place in range(512)), return_exceptions=True)
    await committer.close(5)
    assert sink.num_writes <= 1 + 2 * 9
    assert len(sink.written) == 511


async def test_a_full_queue_refuses_at_once(sink: ScriptedSink, committer: GroupCommitter) -> None:
    sink.gate.clear()
    tasks = [asyncio.create_task(committer.commit(make_entry(place))) for place in range(4)]
    await asyncio.sleep(0.01)
    # The writer holds a batch of 4 at the gate; 8 more fill the queue.
    tasks += [asyncio.create_task(committer.commit(make_entry(place))) for place in range(4, 12)]
    await asyncio.sleep(0.01)
    with pytest.raises(StoreOverloaded, match="8 rows wait"):
        await committer.commit(make_entry(99))
    sink.gate.set()
    await asyncio.gather(*tasks)
    await committer.commit(make_entry(12))
    assert sink.written == list(range(13))


async def test_closing_does_not_wait_for_a_writer_that_hangs(sink: ScriptedSink) -> None:
    committer = GroupCommitter(sink, shown="memory", max_pending=20, max_batch=4)
    committer.start()
    sink.gate.clear()
    tasks = [asyncio.create_task(committer.commit(make_entry(place))) for place in range(12)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_S):
        await committer.close(0.05)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, StoreClosed) for outcome in outcomes)
    assert sink.written == []


async def test_a_closing_committer_refuses(sink: ScriptedSink) -> None:
    committer = GroupCommitter(sink, shown="memory", max_pending=8, max_batch=4)
    committer.start()
    await committer.close(5)
    with pytest.raises(StoreClosed):
        await committer.commit(make_entry(1))


async def test_a_bug_in_the_writer_leaves_nobody_waiting(sink: ScriptedSink) -> None:
    """Also those still queued, and those who come after."""

    async def broken(batch: Sequence[EncodedRecord], *, again: bool) -> None:
        raise AssertionError("our own bug")

    sink.write = broken  # type: ignore[method-assign]
    committer = GroupCommitter(sink, shown="memory", max_pending=8, max_batch=4)
    committer.start()
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(
            *(committer.commit(make_entry(place)) for place in range(8)), return_exceptions=True
        )
    assert len([outcome for outcome in outcomes if isinstance(outcome, Exception)]) == 8
    del sink.write
    async with asyncio.timeout(PATIENCE_S):
        await committer.commit(structs.replace(make_entry(9)))
        await committer.close(5)
    assert sink.written == [9]


@pytest.mark.parametrize("num_breaks", [1, 2, 3, 4, 5])
async def test_a_connection_that_broke_is_dropped_before_the_next_try(num_breaks: int) -> None:
    """A row is tried twice, then its caller is told; a probe finds out when rows can be written again."""
    sink, now_s = BreakingSink(), 0.0
    sink.num_breaks = num_breaks
    committer = GroupCommitter(sink, shown="memory", max_pending=8, max_batch=4, clock=lambda: now_s)
    committer.start()
    async with asyncio.timeout(PATIENCE_S):
        if num_breaks == 1:
            await committer.commit(make_entry(1))
        else:
            with pytest.raises(StoreUnavailable):
                await committer.commit(make_entry(1))
        for _ in range(num_breaks - 2):
            with pytest.raises(StoreUnavailable):
                await committer.check()
            now_s += 1
        await committer.check()
        await committer.commit(make_entry(2))
        await committer.close(5)
    assert committer.is_well
    assert committer.num_probes == max(0, num_breaks - 1)
    num_failed = int(num_breaks > 1)
    assert (committer.num_failed, committer.num_rows, committer.num_commits) == (num_failed, *[2 - num_failed] * 2)
    assert sink.written == ([1, 2] if num_breaks == 1 else [2])


async def test_two_gateways_share_a_database(database_url: str) -> None:
    """Same sessions and keys from both at once: no deadlock, nothing lost."""
    config = StoreConfig(url=database_url, busy_timeout_s=30)
    records = [
        make_record(session_id=str(place % 7), key_id=f"k{place % 3}", final_tier=1, created_at=NOW)
        for place in range(400)
    ]
    async with Store(config) as one, Store(config) as other:
        for place in range(3):
            key = ApiKey(key_id=f"k{place}", name="n", key_hash=str(place), prefix="p", created_at=NOW)
            await one.insert_key(key)
        await asyncio.gather(*((one, other)[place % 2].record(record) for place, record in enumerate(records)))
        assert {key.last_used_at for key in await other.list_keys()} == {NOW}
    assert await stored_ids(database_url) == {record.request_id for record in records}


async def test_sqlite_syncs_as_told(sqlite_url: str) -> None:
    for sync, level in (("full", 2), ("normal", 1)):
        config = StoreConfig(url=sqlite_url, sqlite_sync=sync)  # type: ignore[arg-type]
        connection = connect_sqlite(Path(sqlite_url.removeprefix("sqlite:///")), config)
        assert connection.execute("PRAGMA synchronous").fetchone() == (level,)
        connection.close()
