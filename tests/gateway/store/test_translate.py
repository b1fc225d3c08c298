"""What the drivers raise becomes one of ours: the fault of a row, a full disk, or a database that does not answer."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from gateway.config.store_section import StoreConfig
from gateway.store.engines import make_engine, prepare_sqlite_file, truncate_wal, use_wal
from gateway.store.errors import (
    DatabaseInUse,
    FeedbackFull,
    RecordRejected,
    SchemaMismatch,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from gateway.store.store import Store
from gateway.store.translate import RowFault, translate
from gateway.store.urls import parse_database_url


def raised_by(work: Callable[[sqlite3.Connection], object], path: Path) -> sqlite3.Error:
    """Return what SQLite itself raises."""
    connection = sqlite3.connect(path, timeout=0.0)
    try:
        with pytest.raises(sqlite3.Error) as caught:
            work(connection)
        return caught.value
    finally:
        connection.close()


def fill_up(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE t (a)")
    connection.execute("PRAGMA max_page_count = 3")
    connection.execute("INSERT INTO t VALUES (zeroblob(1000000))")


def write_beside_another(connection: sqlite3.Connection) -> None:
    (path,) = [row[2] for row in connection.execute("PRAGMA database_list")]
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("CREATE TABLE t (a)")
    finally:
        other.close()


TWICE = "CREATE TABLE t (a UNIQUE); INSERT INTO t VALUES (1), (1)"
SQLITE: dict[str, tuple[Callable[[sqlite3.Connection], object], type[Exception], str]] = {
    "a full disk": (fill_up, StoreFull, "No space is left"),
    "a lock": (write_beside_another, StoreUnavailable, "locked by another process"),
    "a broken rule": (lambda c: c.executescript(TWICE), RowFault, ""),
    "a value too large": (lambda c: c.execute("SELECT zeroblob(2000000000)"), RowFault, ""),
    "a value of no type": (lambda c: c.execute("SELECT ?", (object(),)), RowFault, ""),
    "a missing table": (lambda c: c.execute("SELECT * FROM absent"), StoreUnavailable, "cannot be used: Operational"),
}  # fmt: skip


@pytest.mark.parametrize("what", SQLITE)
def test_what_sqlite_raises(tmp_path: Path, what: str) -> None:
    work, kind, said = SQLITE[what]
    found = translate(raised_by(work, tmp_path / "suffice.db"), "sqlite:///shown")
    assert type(found) is kind
    assert said in str(found)
    if isinstance(found, StoreUnavailable):
        assert (found.database, found.retryable) == ("sqlite:///shown", True)
        assert found.retry_after_s == (10.0 if kind is StoreFull else 1.0)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (asyncpg.DiskFullError("no room"), StoreFull, "No space is left"),
        (asyncpg.CardinalityViolationError("two"), RowFault, "two"),
        (asyncpg.NumericValueOutOfRangeError("large"), RowFault, "large"),
        (asyncpg.UniqueViolationError("twice"), RowFault, "twice"),
        (asyncpg.ProgramLimitExceededError("long"), RowFault, "long"),
        (asyncpg.AdminShutdownError("bye"), StoreUnavailable, "cannot be used: AdminShutdownError: bye"),
        (asyncpg.TooManyConnectionsError("full"), StoreUnavailable, "cannot be used"),
        (asyncpg.exceptions.DataError("no number"), RowFault, "no number"),
        (OverflowError("far"), RowFault, "far"),
        (TimeoutError(), StoreUnavailable, "postgresql://shown did not answer in time."),
        (ConnectionRefusedError("closed"), StoreUnavailable, "does not answer: ConnectionRefusedError: closed"),
        (OSError(), StoreUnavailable, "does not answer: OSError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_postgresql_and_the_network_raise(error: Exception, kind: type[Exception], said: str) -> None:
    for each in (error, wrapped(error)):
        found = translate(each, "postgresql://shown")
        assert type(found) is kind
        assert said in str(found)
        if isinstance(found, StoreUnavailable):
            assert found.database == "postgresql://shown"


def wrapped(error: Exception) -> DBAPIError:
    """Return an error as SQLAlchemy hands it on: the driver's own is the cause of its adapter's."""
    adapter = Exception("adapter")
    adapter.__cause__ = error
    return DBAPIError("SELECT 1", None, adapter if isinstance(error, asyncpg.PostgresError) else error)


def test_what_is_ours_already_stays() -> None:
    for ours in (StoreClosed("closed"), RowFault("row"), RecordRejected("r", "why")):
        assert translate(ours, "x") is ours


def test_errors_carry_the_values_that_they_show() -> None:
    unavailable = StoreUnavailable("down", database="db")
    assert (unavailable.database, unavailable.retry_after_s, unavailable.retryable) == ("db", 1.0, True)
    rejected = RecordRejected("r1", "a number too large")
    assert (rejected.request_id, rejected.problem, rejected.retryable) == ("r1", "a number too large", False)
    assert FeedbackFull("r1", 16, 100).request_id == "r1"
    in_use = DatabaseInUse("db", "123")
    assert (in_use.database, in_use.holder) == ("db", "123")
    mismatch = SchemaMismatch("db", None, "0009", "Upgrade.")
    assert (mismatch.database, mismatch.found, mismatch.expected) == ("db", None, "0009")
    shown: list[tuple[StoreError, tuple[str, ...]]] = [
        (rejected, ("r1", "too large")),
        (in_use, ("db", "123")),
        (mismatch, ("db", "none", "0009", "Upgrade.")),
    ]
    for error, parts in shown:
        assert all(part in str(error) for part in parts)
    assert "process" not in str(DatabaseInUse("db", ""))


@pytest.mark.parametrize("level", ["full", "normal"])
async def test_every_connection_to_a_file_keeps_the_rules_that_erasure_rests_on(sqlite_url: str, level: str) -> None:
    config = StoreConfig(url=sqlite_url, sqlite_sync=level)
    engine = make_engine(parse_database_url(sqlite_url), config)
    async with engine.connect() as connection:
        names = ("foreign_keys", "secure_delete", "synchronous")
        found = [(await connection.exec_driver_sql(f"PRAGMA {name}")).scalar() for name in names]
    await engine.dispose()
    assert found == [1, 1, {"full": 2, "normal": 1}[level]]


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    url = parse_database_url(f"sqlite:///{tmp_path}")
    with pytest.raises(StoreUnavailable, match="cannot be opened for writing") as refused:
        prepare_sqlite_file(url)
    assert refused.value.database == url.shown
    url = parse_database_url(f"sqlite:///{tmp_path / 'text.db'}")
    assert url.path is not None
    url.path.write_text("no database at all, but a text that is longer than its header" * 20)
    engine = make_engine(url, StoreConfig(url=f"sqlite:///{url.path}"))
    with pytest.raises(StoreUnavailable, match="not a database"):
        await use_wal(engine, url)
    await engine.dispose()


async def test_the_log_is_emptied_only_when_nobody_reads_it(sqlite_url: str) -> None:
    url = parse_database_url(sqlite_url)
    assert url.path is not None
    async with Store(StoreConfig(url=sqlite_url)) as store:
        reader = sqlite3.connect(url.path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM requests").fetchone()
        async with store.transaction() as connection:
            await connection.execute(text("CREATE TABLE later (a)"))
        engine = make_engine(url, StoreConfig(url=sqlite_url, busy_timeout_s=0))
        assert not await truncate_wal(engine, url)
        reader.close()
        assert await truncate_wal(engine, url)
        assert url.path.with_name(f"{url.path.name}-wal").stat().st_size == 0
        await engine.dispose()


async def test_a_transaction_raises_ours(store: Store) -> None:
    async def fail() -> None:
        async with store.transaction() as connection:
            await connection.execute(text("SELECT * FROM absent"))

    with pytest.raises(StoreUnavailable) as caught:
        await fail()
    assert isinstance(caught.value.__cause__, SQLAlchemyError)
    assert caught.value.database == store.shown_url
