"""Bad days of the database: down, dying, frozen, locked, full, gone. A clear error, nothing hung, then service."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from gateway.config.store_section import StoreConfig
from gateway.store import migrate
from gateway.store.errors import SchemaMismatch, StoreError, StoreFull, StoreUnavailable
from gateway.store.store import Store
from tests.faults import PrivatePostgres, TinyDisk
from tests.gateway.records import make_record


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def move_database(path: Path, to: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").rename(f"{to}{suffix}")


@pytest.fixture
async def served(private_postgres: PrivatePostgres) -> AsyncIterator[Store]:
    config = StoreConfig(url=private_postgres.url, connect_timeout_s=2, write_timeout_s=1)
    async with Store(config) as opened:
        yield opened


async def test_down_at_start_is_refused_without_the_password(free_port: int) -> None:
    store = Store(StoreConfig(url=f"postgresql://someone:hunter2@127.0.0.1:{free_port}/suffice"))
    with pytest.raises(StoreUnavailable) as refused:
        await store.open()
    await store.close()
    message = str(refused.value)
    assert "hunter2" not in message
    assert f"postgresql://someone:***@127.0.0.1:{free_port}/suffice" in message
    assert "refused" in message.lower()


@pytest.mark.db
async def test_a_wrong_database_name_is_refused_at_start(postgres_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist"):
        async with Store(StoreConfig(url=f"{postgres_url}_missing")):
            pass


@pytest.mark.db
async def test_dies_while_serving_and_comes_back(private_postgres: PrivatePostgres, served: Store) -> None:
    before = make_record()
    await served.record(before)
    private_postgres.stop()
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*(served.record(make_record()) for _ in range(32)), return_exceptions=True)
        assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
        assert "hunter2" not in str(outcomes[0])
        with pytest.raises(StoreUnavailable):
            await served.get_request(before.request_id)
        with pytest.raises(StoreUnavailable):
            await served.ping()
    private_postgres.start()
    after = make_record()
    await served.record(after)
    await served.ping()
    assert {record.request_id for record in await served.recent()} == {before.request_id, after.request_id}


@pytest.mark.db
async def test_a_restart_between_two_requests_goes_unnoticed(private_postgres: PrivatePostgres, served: Store) -> None:
    await served.record(make_record())
    private_postgres.stop("fast")
    private_postgres.start()
    await asyncio.gather(*(served.record(make_record()) for _ in range(8)))
    assert len(await served.recent()) == 9


@pytest.mark.db
async def test_a_frozen_server_is_given_up_on_in_time(private_postgres: PrivatePostgres, served: Store) -> None:
    await served.record(make_record())
    frozen = private_postgres.freeze()
    try:
        async with asyncio.timeout(20):
            with pytest.raises(StoreUnavailable):
                await served.record(make_record())
    finally:
        private_postgres.thaw(frozen)
    await served.record(make_record())


@pytest.mark.db
async def test_connections_killed_under_load_lose_nothing(postgres_url: str) -> None:
    """Whatever ``record`` said was committed is there, exactly once, however often the connection is cut."""
    async with Store(StoreConfig(url=postgres_url)) as store:
        killer = await asyncpg.connect(postgres_url)
        told: list[str] = []
        killing = True

        async def write() -> None:
            # A machine too slow to commit between two cuts still commits after the last one.
            committed = False
            while killing or not committed:
                record = make_record()
                try:
                    await store.record(record)
                except StoreUnavailable:
                    await asyncio.sleep(0)
                    committed = False
                    continue
                committed = True
                told.append(record.request_id)

        writers = [asyncio.create_task(write()) for _ in range(16)]
        for _ in range(100):
            await killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await asyncio.sleep(0.005)
        killing = False
        async with asyncio.timeout(60):
            await asyncio.gather(*writers)
        rows = await killer.fetch("SELECT request_id FROM requests")
        await killer.close()
        assert set(told) <= {row["request_id"] for row in rows}
        assert len(told) >= len(writers)


@pytest.mark.db
async def test_a_full_disk_under_postgres(private_postgres: PrivatePostgres, tiny_disk: TinyDisk) -> None:
    """The table's own files have no room: a statement fails with SQLSTATE 53100, the cluster lives."""
    disk = tiny_disk.resize(3)
    space = disk / "space"
    space.mkdir()
    shutil.chown(space, "postgres")
    await execute(private_postgres.url, f"CREATE TABLESPACE tiny LOCATION '{space}'")
    await execute(private_postgres.url, "ALTER ROLE postgres SET default_tablespace = tiny")
    async with Store(StoreConfig(url=private_postgres.url)) as store:
        num_stored = await fill_until_full(store)
        assert len(await store.recent(limit=1000)) == num_stored
        tiny_disk.resize(30)
        await store.record(make_record())
        assert len(await store.recent(limit=1000)) == num_stored + 1


async def fill_until_full(store: Store) -> int:
    """Write big rows until the disk is full; how many were stored."""
    num_stored = 0
    async with asyncio.timeout(60):
        while True:
            try:
                await store.record(make_record(prompt_text=os.urandom(50_000).hex()))
            except StoreFull:
                return num_stored
            num_stored += 1
            assert num_stored < 1000


async def test_a_full_disk_under_sqlite(tiny_disk: TinyDisk) -> None:
    disk = tiny_disk.resize(3)
    async with Store(StoreConfig(url=f"sqlite:///{disk / 'suffice.db'}")) as store:
        num_stored = await fill_until_full(store)
        assert num_stored > 0
        with pytest.raises(StoreFull, match="No space is left where sqlite:///"):
            await store.record(make_record(prompt_text="x" * 2_000_000))
        outcomes = await asyncio.gather(
            *(store.record(make_record(prompt_text="x" * 200_000)) for _ in range(16)), return_exceptions=True
        )
        assert any(isinstance(outcome, StoreFull) for outcome in outcomes)
        num_stored += sum(outcome is None for outcome in outcomes)
        tiny_disk.resize(20)
        await store.record(make_record())
        assert len(await store.recent(limit=1000)) == num_stored + 1


async def test_a_full_disk_at_start(tiny_disk: TinyDisk) -> None:
    disk = tiny_disk.resize(1)
    with pytest.raises(OSError, match="space"):
        (disk / "ballast").write_bytes(b"\0" * 2**21)
    with pytest.raises(StoreError):
        async with Store(StoreConfig(url=f"sqlite:///{disk / 'suffice.db'}")):
            pass


async def test_sqlite_locked_by_another_process(sqlite_url: str) -> None:
    async with Store(StoreConfig(url=sqlite_url, busy_timeout_s=0.1)) as store:
        other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked by another process"):
            await store.record(make_record())
        # Readers do not wait for writers.
        assert await store.recent() == []
        other.execute("ROLLBACK")
        other.close()
        await store.record(make_record())
        assert len(await store.recent()) == 1


async def test_sqlite_waits_for_a_short_lock(sqlite_url: str) -> None:
    async with Store(StoreConfig(url=sqlite_url, busy_timeout_s=10)) as store:
        other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.record(make_record()))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        other.execute("ROLLBACK")
        other.close()
        await waiting


async def test_a_deleted_file_is_not_written_to_in_the_dark(sqlite_url: str) -> None:
    """Unlinked, the old inode would take rows that nobody ever finds again."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    async with Store(StoreConfig(url=sqlite_url)) as store:
        await store.record(make_record())
        moved = path.with_suffix(".moved")
        move_database(path, moved)
        with pytest.raises(StoreUnavailable):
            await store.record(make_record())
        assert path.name not in os.listdir(path.parent)
        move_database(moved, path)
        await store.record(make_record())
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (2,)
    connection.close()


@pytest.mark.parametrize("content", [b"not a database " * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable) as refused:
        async with Store(StoreConfig(url=f"sqlite:///{path}")):
            pass
    assert str(path) in str(refused.value)
    assert path.read_bytes() == content


async def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "suffice.db", tmp_path):
        with pytest.raises(StoreUnavailable, match="cannot be opened for writing"):
            async with Store(StoreConfig(url=f"sqlite:///{place}")):
                pass


async def test_an_old_schema_is_refused_when_not_to_migrate(empty_database_url: str) -> None:
    config = StoreConfig(url=empty_database_url, migrate=False)
    with pytest.raises(SchemaMismatch, match="suffice db upgrade"):
        async with Store(config):
            pass
    await migrate.upgrade(empty_database_url)
    async with Store(config) as store:
        await store.record(make_record())


async def test_a_table_dropped_while_serving(store: Store, database_url: str) -> None:
    if database_url.startswith("sqlite"):
        with sqlite3.connect(database_url.removeprefix("sqlite:///")) as connection:
            connection.execute("ALTER TABLE requests RENAME TO hidden")
    else:
        await execute(database_url, "ALTER TABLE requests RENAME TO hidden")
    with pytest.raises(StoreUnavailable, match="requests"):
        await store.record(make_record())
    with pytest.raises(StoreUnavailable, match="requests"):
        await store.recent()


async def test_opening_the_file_again_does_not_drop_our_locks(sqlite_url: str) -> None:
    """POSIX locks die with any descriptor of the file; then the next process to leave would delete the WAL under us."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    async with Store(StoreConfig(url=sqlite_url)) as store:
        await store.record(make_record())
        async with Store(StoreConfig(url=sqlite_url)) as second:
            await second.record(make_record())
        await migrate.upgrade(sqlite_url)
        program = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('DELETE FROM sessions'); c.close()"
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(path))
        assert await other.wait() == 0
        assert f"{path.name}-wal" in os.listdir(path.parent)
        await store.record(make_record())
        assert len(await store.recent()) == 3
