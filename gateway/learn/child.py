"""A retrain in a process of its own: it may eat memory, crash or be killed, and the server goes on.

The settings travel on standard input, so that neither the command line nor the environment shows a password.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.settings import Settings

_log = logging.getLogger("suffice.learn")

_MAX_TOLD = 500


async def retrain_apart(settings: Settings, run_id: str, trigger: str) -> int:
    """Retrain in a child process and wait for it. Returns its exit status; a child that takes too long is killed.

    Cancelled, it kills the child: a run that nobody waits for is found abandoned and asked for again in its time.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.learn.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C on the server's terminal is the server's to handle.
        start_new_session=True,
    )
    told = json.dumps({"settings": portable(settings), "run_id": run_id, "trigger": trigger}).encode()
    try:
        _, said = await asyncio.wait_for(process.communicate(told), settings.learning.timeout_s)
    except TimeoutError:
        _log.error("retrain %s took longer than %g s and was ended", run_id, settings.learning.timeout_s)
        return await _kill(process)
    except BaseException:
        await asyncio.shield(_kill(process))
        raise
    status = process.returncode or 0
    if status:
        _log.error("retrain %s ended with %d: %s", run_id, status, said.decode(errors="replace")[-_MAX_TOLD:])
    return status


async def _kill(process: asyncio.subprocess.Process) -> int:
    if process.returncode is None:
        process.kill()
    return await process.wait()


def portable(settings: Settings) -> dict[str, Any]:
    """What another process needs to come to the same settings: the file, and what was said beside it."""
    told = {path: settings.values[path] for path, source in settings.sources.items() if source == "command line"}
    told |= {"data_dir": str(settings.data_dir), "database.url": settings.database.url}
    plain = {path: value if isinstance(value, bool | int | float | str) else str(value) for path, value in told.items()}
    file = settings.config_file
    return {"config_file": None if file is None else str(file.absolute()), "overrides": plain}


def main() -> int:
    """Read what is asked on standard input, and do it. 0 when a run ended, 1 when it failed."""
    from gateway.commands.failure import exit_status_of
    from gateway.learn.retrain import Wish, retrain

    told: Mapping[str, Any] = json.load(sys.stdin)
    from gateway.settings import load_settings

    given = told["settings"]
    try:
        settings = load_settings(given["config_file"], overrides=given["overrides"], need_secrets=False)
        os.nice(settings.learning.nice)
        outcome = asyncio.run(retrain(settings, Wish(trigger=told["trigger"], run_id=told["run_id"])))
    except Exception as error:
        status = exit_status_of(error)
        if status is None:
            raise
        return status
    print(f"{outcome.status}: {outcome.reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
