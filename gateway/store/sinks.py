"""Makes batches of rows durable: one raw connection, one transaction a batch, for each database.

The hot path bypasses SQLAlchemy's statement machinery, most of the cost of a row; its tables still give the SQL.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import asyncpg
from sqlalchemy import Table

from gateway.config.store_section import StoreConfig
from gateway.store.errors import StoreUnavailable
from gateway.store.rows import EncodedRecord, EncodeTime, Row, postgres_time, sqlite_time
from gateway.store.tables import (
    api_keys,
    request_texts,
    requests,
    responses,
    sessions,
    verification_texts,
    verifications,
)
from gateway.store.urls import DatabaseUrl

# SQLSTATE classes: 08 connection, 40 rolled back (deadlock), 57 operator intervention (restart).
# 25006: the server has become a standby.
_LOST_CLASSES = frozenset({"08", "40", "57"})
_READ_ONLY = "25006"

# Rows of one SQLite statement. The interpreter is let go and waited for once a statement, not once a row; with the
# log's fifty columns this stays below the 999 values that every build of SQLite takes.
_MOST_ROWS = 16


# Of the size of a row with its texts: a disk that has room for less is full. Written anew each time.
_PROBE_NAME = "log_probe"
_PROBE_BYTES = 16_384
_PROBE_SQL = (
    "INSERT INTO secrets (name, value, created_at) VALUES ({}, {}, {}) "
    "ON CONFLICT (name) DO UPDATE SET value = excluded.value, created_at = excluded.created_at"
)
_SQLITE_PROBE = _PROBE_SQL.format("?", "?", "?")
_POSTGRES_PROBE = _PROBE_SQL.format("$1", "$2", "$3")


class BatchSink(Protocol):
    """Writes batches, one at a time. Reconnects by itself; raises what the driver raises."""

    encode_time: EncodeTime

    async def write(self, batch: Sequence[EncodedRecord], *, again: bool) -> None:
        """Return once every row of ``batch`` is durable, or raise with none of them written.

        ``again``: an earlier try may have been committed without our learning of it; rows already there are no fault.
        """

    @property
    def is_connected(self) -> bool:
        """Whether nothing is known of a lost connection."""

    async def probe(self) -> None:
        """Return once a small write of no meaning is durable. Raises what the driver raises."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether ``error`` may be cured by a fresh connection at once."""

    async def drop(self) -> None:
        """Forget the connection; the next write makes another. Never raises."""

    async def close(self) -> None: ...


def _probe_row(encode_time: EncodeTime) -> tuple[Any, ...]:
    return _PROBE_NAME, os.urandom(_PROBE_BYTES).hex(), encode_time(datetime.now(UTC))


class SqliteSink:
    """A writer's connection in a thread of its own: one hop to it per batch."""

    def __init__(self, url: DatabaseUrl, config: StoreConfig) -> None:
        assert url.path is not None
        self.encode_time: EncodeTime = sqlite_time
        self._path: Path = url.path
        self._shown = url.shown
        self._config = config
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="suffice-log")
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._running: asyncio.Future[None] | None = None
        self._is_closed = False
        self._statements = _Statements("?")

    @property
    def is_connected(self) -> bool:
        return True

    async def probe(self) -> None:
        await self._run(self._probe)

    def _probe(self) -> None:
        connection = self._connected()
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(_SQLITE_PROBE, _probe_row(self.encode_time))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    async def write(self, batch: Sequence[EncodedRecord], *, again: bool) -> None:
        await self._run(self._write, list(batch), again)

    async def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._running is not None and not self._running.done():
            raise StoreUnavailable(
                f"{self._shown}: an earlier write has not returned; the disk hangs.", database=self._shown
            )
        loop = asyncio.get_running_loop()
        self._running = loop.run_in_executor(self._executor, work, *arguments)
        # Shielded: a thread cannot be interrupted, so on timeout it is left to end and told apart by ``_running``.
        await asyncio.wait_for(asyncio.shield(self._running), self._config.write_timeout_s)

    def _write(self, batch: list[EncodedRecord], again: bool) -> None:
        connection = self._connected()
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, rows in self._statements.of(batch, again=again):
                for together in _together(rows) if statement.row else [[row] for row in rows]:
                    connection.execute(statement.sql(len(together)), list(chain.from_iterable(together)))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _connected(self) -> sqlite3.Connection:
        """The connection, made anew when the file is no longer the one it opened (deleted, restored from a backup)."""
        if self._connection is not None and self._inode != _inode(self._path):
            self._disconnect()
        if self._connection is None:
            self._connection = connect_sqlite(self._path, self._config)
            self._inode = _inode(self._path)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def is_lost(self, error: BaseException) -> bool:
        return False

    async def drop(self) -> None:
        """Nothing to forget: a SQLite connection outlives its errors."""

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        closing = asyncio.get_running_loop().run_in_executor(self._executor, self._disconnect)
        self._executor.shutdown(wait=False)
        # A disk that hangs must not hang the shutdown as well.
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(closing), self._config.write_timeout_s)


class PostgresSink:
    """One asyncpg connection; a batch is one pipelined ``executemany`` or, with several tables, one transaction."""

    def __init__(self, url: DatabaseUrl, config: StoreConfig) -> None:
        self.encode_time: EncodeTime = postgres_time
        self._url = url
        self._config = config
        self._connection: Any = None
        self._statements = _Statements("$")

    @property
    def is_connected(self) -> bool:
        return self._connection is None or not self._connection.is_closed()

    async def probe(self) -> None:
        async with asyncio.timeout(self._config.write_timeout_s):
            if self._connection is None or self._connection.is_closed():
                self._connection = await connect_postgres(self._url, self._config)
            await self._connection.execute(_POSTGRES_PROBE, *_probe_row(self.encode_time))

    async def write(self, batch: Sequence[EncodedRecord], *, again: bool) -> None:
        async with asyncio.timeout(self._config.write_timeout_s):
            if self._connection is None or self._connection.is_closed():
                self._connection = await connect_postgres(self._url, self._config)
            work = self._statements.of(batch, again=again)
            if len(work) == 1:
                # executemany is a transaction by itself: one round trip.
                statement, rows = work[0]
                await self._connection.executemany(statement.sql(), rows)
                return
            async with self._connection.transaction():
                for statement, rows in work:
                    await self._connection.executemany(statement.sql(), rows)

    def is_lost(self, error: BaseException) -> bool:
        if isinstance(error, asyncpg.PostgresError):
            return str(error.sqlstate or "")[:2] in _LOST_CLASSES or error.sqlstate == _READ_ONLY
        if isinstance(error, TimeoutError):
            # Not cured by waiting as long again.
            return False
        # asyncpg calls a connection whose end it has not read yet an internal error.
        return isinstance(error, (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError))

    async def drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=self._config.connect_timeout_s)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()


def connect_sqlite(path: Path, config: StoreConfig) -> sqlite3.Connection:
    """A raw connection to an existing file (never creates one: an empty file is not the log)."""
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        timeout=config.busy_timeout_s,
        check_same_thread=False,
    )
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute(f"PRAGMA synchronous={config.sqlite_sync}")
    return connection


async def connect_postgres(url: DatabaseUrl, config: StoreConfig) -> Any:
    parts = url.sqlalchemy_url
    return await asyncpg.connect(
        **{
            "host": parts.host,
            "port": parts.port,
            "user": parts.username,
            "password": parts.password,
            "database": parts.database,
            **url.connect_args,
        },
        timeout=config.connect_timeout_s,
        command_timeout=config.write_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class _Statement:
    """One statement: what stands before its row of values, the row (empty where it takes none), what stands after."""

    before: str
    row: str = ""
    after: str = ""

    def sql(self, num_rows: int = 1) -> str:
        """The text for so many rows."""
        return self.before + ", ".join([self.row] * num_rows) + self.after


def _together(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows in runs of a power of two, so that a connection has few statements to remember."""
    begin = 0
    while (left := len(rows) - begin) > 0:
        size = min(1 << (left.bit_length() - 1), _MOST_ROWS)
        yield rows[begin : begin + size]
        begin += size


class _Statements:
    """The SQL of a batch, in the placeholder style of a driver (``?`` or ``$``)."""

    def __init__(self, style: str) -> None:
        self._style = style
        inserted = (requests, request_texts, responses, verifications, verification_texts)
        self._insert = {table.name: self._sql_insert(table) for table in inserted}
        columns = [column.name for column in sessions.c]
        updates = ", ".join(f"{name} = excluded.{name}" for name in columns[2:])
        self._upsert_session = replace(
            self._sql_insert(sessions),
            after=f" ON CONFLICT (tenant, session_id) DO UPDATE SET {updates} "
            f"WHERE {sessions.name}.updated_at <= excluded.updated_at",
        )
        self._use_key = _Statement(
            f"UPDATE {api_keys.name} SET last_used_at = {self._mark(1)} WHERE key_id = {self._mark(2)}"
        )

    def of(self, batch: Sequence[EncodedRecord], *, again: bool) -> list[tuple[_Statement, list[Row]]]:
        """Statements and their rows, in the order that foreign keys need; empty ones left out."""
        work = [(self._inserted(requests, again), [entry.request for entry in batch])]
        texts = [entry.text for entry in batch if entry.text is not None]
        session_rows = [entry.session for entry in batch if entry.session is not None]
        # In one order everywhere, so that two servers updating the same rows cannot deadlock.
        session_rows.sort(key=lambda row: row[:2])
        key_uses = sorted((entry.key_use for entry in batch if entry.key_use is not None), key=lambda row: row[1])
        kept = [entry.response for entry in batch if entry.response is not None]
        work.append((self._inserted(request_texts, again), texts))
        work.append((self._inserted(responses, again), kept))
        work.append((self._inserted(verifications, again), [entry.job for entry in batch if entry.job is not None]))
        job_texts = [entry.job_text for entry in batch if entry.job_text is not None]
        work.append((self._inserted(verification_texts, again), job_texts))
        work.append((self._upsert_session, session_rows))
        work.append((self._use_key, key_uses))
        return [(statement, rows) for statement, rows in work if rows]

    def _inserted(self, table: Table, again: bool) -> _Statement:
        """The insertion into a table, whose rows may be there already where an earlier try may have been committed."""
        statement = self._insert[table.name]
        key = next(iter(table.primary_key)).name
        return replace(statement, after=f" ON CONFLICT ({key}) DO NOTHING") if again else statement

    def _sql_insert(self, table: Table) -> _Statement:
        names = [column.name for column in table.c]
        marks = ", ".join(self._mark(place) for place in range(1, len(names) + 1))
        return _Statement(f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ", f"({marks})")

    def _mark(self, place: int) -> str:
        return "?" if self._style == "?" else f"${place}"


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
