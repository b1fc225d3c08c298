"""Work in a process of its own: it may eat memory, crash or be killed, and the server goes on.

What is asked travels on standard input, so that neither the command line nor the environment shows a password.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX_TOLD = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """Holds how a child process ended.

    Attributes
    ----------
    status : its exit status
    output : what it wrote on standard output
    said : the end of what it wrote on standard error
    """

    status: int
    output: bytes
    said: str


async def run_apart(module: str, told: Mapping[str, Any], *, timeout_s: float) -> Ended:
    """Run a module as a child process that is told JSON, and wait for it; cancelled or out of time, it is killed.

    Raises
    ------
    TimeoutError
        It took too long, and is gone.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        # Nothing is imported from the working directory, which may be anybody's.
        "-P",
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C on the server's terminal is the server's to handle.
        start_new_session=True,
    )
    try:
        output, said = await asyncio.wait_for(process.communicate(json.dumps(told).encode()), timeout_s)
    except BaseException:
        if process.returncode is None:
            process.kill()
        await asyncio.shield(process.wait())
        raise
    return Ended(process.returncode or 0, output, said.decode(errors="replace")[-_MAX_TOLD:])
