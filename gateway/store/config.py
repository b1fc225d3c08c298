"""What the store needs to be told. Importing this module imports no database driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SqliteSync = Literal["full", "normal"]


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where the log lives and how hard it tries.

    Parameters
    ----------
    url : ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or ``postgresql://user:password@host:port/name``
    migrate : bring the schema up to date at start; when False an old schema is refused instead
    sqlite_sync : ``full`` survives power loss, ``normal`` only the death of the process (see docs/log.md for the cost)
    max_pending_records : rows that may wait for their commit before new ones are refused
    max_batch_records : rows that may share one commit
    busy_timeout_s : how long SQLite waits for another writer of the same file
    connect_timeout_s, write_timeout_s : after these the database counts as unavailable
    pool_size : connections kept for reading (PostgreSQL)
    """

    url: str
    migrate: bool = True
    sqlite_sync: SqliteSync = "full"
    max_pending_records: int = 10_000
    max_batch_records: int = 512
    busy_timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    write_timeout_s: float = 15.0
    pool_size: int = 5
