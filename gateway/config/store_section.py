# ruff: noqa: RUF009 - option returns a dataclasses.field
"""Declares the section ``[database]``. Importing this module imports no database driver."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal

from backends.config import option

SqliteSync = Literal["full", "normal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Sets where the log lives and how hard it tries."""

    url: str = option(MISSING, "`sqlite:////path/to/file.db` or `postgresql://user:password@host:port/name`.")
    migrate: bool = option(True, "Bring the schema up to date at start; when false, an old schema is refused.")
    sqlite_sync: SqliteSync = option(
        "full", "`full` survives power loss; `normal`, cheaper, only the death of the process."
    )
    max_pending_records: int = option(
        10_000, "Rows that may wait for their commit before more are refused.", at_least=1
    )
    max_batch_records: int = option(512, "Rows that may share one commit.", at_least=1, at_most=10_000)
    busy_timeout_s: float = option(5.0, "How long SQLite waits for another writer of the file.", at_least=0)
    connect_timeout_s: float = option(5.0, "A database that takes longer to connect is unavailable.", at_least=0.1)
    write_timeout_s: float = option(15.0, "A statement or commit that takes longer has failed.", at_least=0.1)
    report_timeout_s: float = option(
        60.0, "A report, or the monitor's look at the traffic, that reads longer than this has failed.", at_least=0.1
    )
    pool_size: int = option(5, "Connections kept for reading (PostgreSQL).", at_least=1, at_most=100)
