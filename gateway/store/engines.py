"""SQLAlchemy engines for everything that is not the hot path: reading, keys, migrations."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import orjson
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.config.store_section import StoreConfig
from gateway.store.errors import StoreUnavailable
from gateway.store.translate import translate
from gateway.store.urls import DatabaseUrl

_WAL_TRIES = 20
_WAL_PAUSE_S = 0.05


def make_engine(url: DatabaseUrl, config: StoreConfig) -> AsyncEngine:
    """An engine that reconnects by itself (a dead pooled connection is noticed before it is used)."""
    common: dict[str, Any] = {
        "json_serializer": _dump_json,
        "json_deserializer": orjson.loads,
        "pool_pre_ping": True,
        # Errors are logged: what a statement was given may be a text or the hash of a key.
        "hide_parameters": True,
    }
    if url.dialect == "sqlite":
        engine = create_async_engine(
            url.sqlalchemy_url, connect_args={"timeout": config.busy_timeout_s}, pool_size=2, **common
        )
        event.listen(engine.sync_engine, "connect", _sqlite_pragmas(config))
        return engine
    arguments = {
        "timeout": config.connect_timeout_s,
        "command_timeout": config.write_timeout_s,
        **url.connect_args,
    }
    return create_async_engine(
        url.sqlalchemy_url,
        connect_args=arguments,
        pool_size=config.pool_size,
        pool_timeout=config.connect_timeout_s,
        **common,
    )


def prepare_sqlite_file(url: DatabaseUrl) -> None:
    """Make the file and its folder, readable by their owner alone: the log may hold prompts.

    Raises
    ------
    StoreUnavailable : the place cannot be written
    """
    assert url.path is not None
    try:
        url.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Never an existing one: closing any descriptor of a file drops all POSIX locks this process holds on it, and
        # SQLite's locks are such. Another process would then delete the write-ahead log under our connections.
        os.close(os.open(url.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        if not url.path.is_file() or not os.access(url.path, os.R_OK | os.W_OK):
            raise _not_writable(url, "it is no file, or not this user's to write") from None
    except OSError as error:
        raise _not_writable(url, error) from error


def _not_writable(url: DatabaseUrl, problem: object) -> StoreUnavailable:
    return StoreUnavailable(
        f"{url.shown} cannot be opened for writing: {problem}. Name another file in database.url.", database=url.shown
    )


async def use_wal(engine: AsyncEngine, url: DatabaseUrl) -> None:
    """Write-ahead logging, a property of the file: readers and the writer do not wait for each other.

    Raises
    ------
    StoreUnavailable : the file is no SQLite database, is locked, or lies where WAL cannot work (some network mounts)
    """
    try:
        async with engine.connect() as connection:
            mode = (await connection.exec_driver_sql("PRAGMA journal_mode=WAL")).scalar()
    except SQLAlchemyError as error:
        raise translate(error, url.shown) from error
    if mode != "wal":
        raise StoreUnavailable(
            f"{url.shown} cannot use write-ahead logging (journal mode stays {mode!r}). "
            "Put the file on a local disk, or use PostgreSQL.",
            database=url.shown,
        )


async def truncate_wal(engine: AsyncEngine, url: DatabaseUrl) -> bool:
    """Bring the write-ahead log home and cut it to nothing: it holds earlier contents of pages until then.

    False where a reader or writer was in the way all the time; the next call may do it.

    Raises
    ------
    StoreUnavailable and its kinds
    """
    for _ in range(_WAL_TRIES):
        try:
            async with engine.connect() as connection:
                is_busy = (await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")).one()[0]
        except SQLAlchemyError as error:
            raise translate(error, url.shown) from error
        if not is_busy:
            return True
        await asyncio.sleep(_WAL_PAUSE_S)
    return False


def _sqlite_pragmas(config: StoreConfig) -> Any:
    def set_pragmas(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys=ON")
        # What is deleted is overwritten, not only taken out of the tree: texts that are gone must be gone.
        cursor.execute("PRAGMA secure_delete=ON")
        cursor.execute(f"PRAGMA synchronous={config.sqlite_sync}")
        cursor.close()

    return set_pragmas


def _dump_json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
