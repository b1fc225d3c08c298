"""The border to the drivers: their exceptions become ours, or are recognised as the fault of one row."""

from __future__ import annotations

import sqlite3

import asyncpg
from sqlalchemy.exc import DBAPIError

from gateway.store.errors import StoreError, StoreFull, StoreUnavailable

# SQLite primary result codes that say "this statement's values", not "this database".
_SQLITE_ROW_CODES = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH})
_SQLITE_BUSY_CODES = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})

# SQLSTATE classes likewise: 21 cardinality, 22 data, 23 constraint, 54 program limit.
_POSTGRES_ROW_CLASSES = frozenset({"21", "22", "23", "54"})
_POSTGRES_DISK_FULL = "53100"


class RowFault(Exception):
    """The values are at fault; the same batch without them may succeed. Never leaves the store."""


def translate(error: BaseException, shown: str) -> StoreError | RowFault:
    """Name what went wrong.

    Parameters
    ----------
    error : from sqlite3, asyncpg, SQLAlchemy or the operating system
    shown : the database, fit for printing

    Returns
    -------
    A :class:`StoreError` about the database, or a :class:`RowFault` about the values.
    """
    if isinstance(error, (StoreError, RowFault)):
        return error
    if isinstance(error, DBAPIError) and error.orig is not None:
        return translate(_innermost(error.orig), shown)
    if isinstance(error, sqlite3.Error):
        return _translate_sqlite(error, shown)
    if isinstance(error, asyncpg.PostgresError):
        return _translate_postgres(error, shown)
    # asyncpg.DataError derives from both InterfaceError and ValueError: a value it cannot encode.
    if isinstance(error, (asyncpg.exceptions.DataError, OverflowError, UnicodeError, ValueError, TypeError)):
        return RowFault(_say(error))
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"{shown} did not answer in time.", database=shown)
    return StoreUnavailable(f"{shown} does not answer: {_say(error)}", database=shown)


def _translate_sqlite(error: sqlite3.Error, shown: str) -> StoreError | RowFault:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if primary == sqlite3.SQLITE_FULL:
        return _full(shown, error)
    if primary in _SQLITE_BUSY_CODES:
        return StoreUnavailable(
            f"{shown} is locked by another process. Only one server may write to a SQLite file at a time "
            "for long; use PostgreSQL for several.",
            database=shown,
        )
    # Without a code the driver refused a value (wrong type, too large an integer) before the database saw it.
    if primary in _SQLITE_ROW_CODES or (primary is None and not isinstance(error, sqlite3.OperationalError)):
        return RowFault(_say(error))
    return StoreUnavailable(f"{shown} cannot be used: {_say(error)}", database=shown)


def _translate_postgres(error: asyncpg.PostgresError, shown: str) -> StoreError | RowFault:
    state = str(error.sqlstate or "")
    if state == _POSTGRES_DISK_FULL:
        return _full(shown, error)
    if state[:2] in _POSTGRES_ROW_CLASSES:
        return RowFault(_say(error))
    return StoreUnavailable(f"{shown} cannot be used: {_say(error)}", database=shown)


def _full(shown: str, error: BaseException) -> StoreFull:
    return StoreFull(
        f"No space is left where {shown} writes ({_say(error)}). Free space; the service goes on by itself.",
        database=shown,
        retry_after_s=10.0,
    )


def _innermost(error: BaseException) -> BaseException:
    """SQLAlchemy's asyncpg adapter wraps the driver's own exception as ``__cause__``."""
    while not isinstance(error, (sqlite3.Error, asyncpg.PostgresError)) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
