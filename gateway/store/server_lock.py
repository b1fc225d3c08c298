"""Keeps a second server off a SQLite file: each would keep its own books of limits, and never read the other's.

The lock is the kernel's (``flock``) on a file beside the database, so it ends with its process, however that ends. It
is advisory and holds no other process up: commands, verification workers and retrains open the same database beside
its server. On a network file system whose ``flock`` is local to a machine it protects against servers of that machine
alone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gateway.store.errors import DatabaseInUse

_MAX_PID_BYTES = 32


class ServerLock:
    """Held by the server of one SQLite file.

    Parameters
    ----------
    database : the SQLite file
    shown : its URL, fit for printing
    """

    def __init__(self, database: Path, shown: str) -> None:
        # Links to one file are one database.
        self.path = Path(f"{database.resolve()}.server-lock")
        self._shown = shown
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take it at once, or not at all.

        Raises
        ------
        DatabaseInUse
            Another server has it.
        OSError
            The file cannot be made.
        """
        # Not inherited: a child that outlives this process must not keep the lock.
        descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _MAX_PID_BYTES, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise DatabaseInUse(self._shown, holder) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give it back. The file stays: removing it could remove one that another server has just locked."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
