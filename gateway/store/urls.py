"""Database URLs: what is accepted, what is refused, and how one is shown without its password."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from gateway.config.display import mask_passwords
from gateway.store.errors import StoreUrlInvalid

Dialect = Literal["sqlite", "postgresql"]

_DRIVERS: dict[str, tuple[Dialect, str]] = {
    "sqlite": ("sqlite", "sqlite+aiosqlite"),
    "sqlite+aiosqlite": ("sqlite", "sqlite+aiosqlite"),
    "postgres": ("postgresql", "postgresql+asyncpg"),
    "postgresql": ("postgresql", "postgresql+asyncpg"),
    "postgresql+asyncpg": ("postgresql", "postgresql+asyncpg"),
}

# libpq's spelling -> asyncpg's argument.
_POSTGRES_OPTIONS = {"sslmode": "ssl", "ssl": "ssl", "host": "host", "application_name": "application_name"}


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """A database URL that this store can open.

    ``shown`` is safe to print. ``path`` is the file (SQLite), ``connect_args`` what asyncpg is given (PostgreSQL).
    """

    dialect: Dialect
    sqlalchemy_url: URL
    shown: str
    path: Path | None
    connect_args: dict[str, Any]


def parse_database_url(text: str) -> DatabaseUrl:
    """Read a database URL.

    Raises
    ------
    StoreUrlInvalid : not a URL, another database, an option we do not know, SQLite without a file
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # The text may hold a password, so it is not repeated.
        raise StoreUrlInvalid(
            "The database URL cannot be read. Expected sqlite:////path/to/file.db or "
            "postgresql://user:password@host:5432/name (special characters in the password percent-encoded)."
        ) from None
    if url.drivername not in _DRIVERS:
        raise StoreUrlInvalid(
            f"Database {url.drivername!r} is not supported. Expected one of {', '.join(sorted(_DRIVERS))}."
        )
    dialect, driver = _DRIVERS[url.drivername]
    # Of what was written, not of what was read: half a password with an `@` in it is the host to the parser.
    shown = dialect + mask_passwords(text)[len(url.drivername) :]
    if dialect == "sqlite":
        return _sqlite(url.set(drivername=driver), shown)
    return _postgres(url.set(drivername=driver), shown)


def _sqlite(url: URL, shown: str) -> DatabaseUrl:
    if not url.database or url.database == ":memory:" or url.query:
        raise StoreUrlInvalid(
            f"{shown} names no file: the log must outlive the process. "
            "Expected sqlite:////path/to/file.db, without options."
        )
    path = Path(url.database).expanduser().absolute()
    return DatabaseUrl("sqlite", url.set(database=str(path)), shown, path, {})


def _postgres(url: URL, shown: str) -> DatabaseUrl:
    unknown = sorted(set(url.query) - set(_POSTGRES_OPTIONS))
    if unknown:
        # What the parser takes for an option may be the rest of a password; what is shown anyway may be named.
        named = f"the unknown option {unknown[0]!r}" if unknown[0] in shown else "an unknown option"
        raise StoreUrlInvalid(f"{shown} has {named}. Expected one of {', '.join(sorted(_POSTGRES_OPTIONS))}.")
    connect_args: dict[str, Any] = {"server_settings": {"application_name": "suffice"}}
    for name, value in url.query.items():
        if name == "application_name":
            connect_args["server_settings"]["application_name"] = value
        else:
            connect_args[_POSTGRES_OPTIONS[name]] = value
    return DatabaseUrl("postgresql", url.set(query={}), shown, None, connect_args)
