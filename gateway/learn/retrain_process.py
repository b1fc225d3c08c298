"""A retrain in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gateway.child_process import run_apart

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_log = logging.getLogger("suffice.learn")


async def retrain_in_child(settings: Settings, run_id: str, trigger: str) -> int:
    """Retrain in a child process and wait for it. Returns its exit status; a child that takes too long is killed.

    Cancelled, it kills the child: a run that nobody waits for is found abandoned and asked for again in its time.
    """
    told = {"settings": portable(settings), "run_id": run_id, "trigger": trigger}
    try:
        ended = await run_apart("gateway.learn.retrain_process", told, timeout_s=settings.learning.timeout_s)
    except TimeoutError:
        _log.error("retrain %s took longer than %g s and was ended", run_id, settings.learning.timeout_s)
        return -signal.SIGKILL
    if ended.status:
        _log.error("retrain %s ended with %d: %s", run_id, ended.status, ended.said)
    return ended.status


def portable(settings: Settings) -> dict[str, Any]:
    """Return what another process needs for the same settings: the file, and what was given beside it."""
    told = {path: settings.values[path] for path, source in settings.sources.items() if source == "command line"}
    told |= {"data_dir": str(settings.data_dir), "database.url": settings.database.url}
    plain = {path: value if isinstance(value, bool | int | float | str) else str(value) for path, value in told.items()}
    file = settings.config_file
    return {"config_file": None if file is None else str(file.absolute()), "overrides": plain}


def main() -> int:
    """Read what is asked on standard input, and do it. 0 when a run ended, 1 when it failed."""
    from gateway.config.settings import load_settings
    from gateway.failure_report import exit_status_of
    from gateway.learn.retrain import RetrainRequest, retrain

    told: Mapping[str, Any] = json.load(sys.stdin)
    given = told["settings"]
    try:
        settings = load_settings(given["config_file"], overrides=given["overrides"], need_secrets=False)
        os.nice(settings.learning.nice)
        outcome = asyncio.run(retrain(settings, RetrainRequest(trigger=told["trigger"], run_id=told["run_id"])))
    except Exception as error:
        status = exit_status_of(error)
        if status is None:
            raise
        return status
    print(f"{outcome.status}: {outcome.reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
