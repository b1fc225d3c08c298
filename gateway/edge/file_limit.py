"""Raises the limit on open files of this process: each connection is one."""

from __future__ import annotations

import logging
import resource

_log = logging.getLogger("suffice.server")

# What the process opens besides: models, database, upstream connections, logs.
_OTHER_FILES = 512


def raise_file_limit(max_connections: int) -> int:
    """Raise the soft limit as far as needed and allowed; returns the connections that it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    # With a limit below the reserve itself half of it is for connections.
    room = max(soft - _OTHER_FILES, soft // 2)
    _log.warning(
        "at most %d connections instead of %d: this process may have %d open files (raise LimitNOFILE or ulimit -n)",
        room,
        max_connections,
        soft,
    )
    return room
