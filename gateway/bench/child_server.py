"""Servers as processes of their own, and the CPU time they use."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx

_START_TIMEOUT_S = 60.0
# With models to load, beside whatever else the machine does.
_READY_TIMEOUT_S = 300.0

# No balancer is to be sent away, and a bench waits for what it asked.
_OWN_SETTINGS = {"SUFFICE_SERVER__LAME_DUCK_S": "0", "SUFFICE_SERVER__MAX_QUEUE_S": "600"}


@contextmanager
def program(module: str, *arguments: str, log: Path, tree: Path | None = None) -> Iterator[tuple[int, int]]:
    """Run ``python -m module --port PORT …``, its log lines into a file; gives (process id, port) once it answers.

    ``tree`` is another checkout to run it of.
    """
    port = free_port()
    environ = os.environ | _OWN_SETTINGS | ({"PYTHONPATH": str(tree.resolve())} if tree else {})
    with log.open("wb") as lines:
        command = [sys.executable, "-P", "-m", module, "--port", str(port), *arguments]
        process = subprocess.Popen(command, stderr=lines, env=environ)
    try:
        _wait(process, port, log)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at start: {log.read_text(errors='replace')[-2000:]}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the server does not answer on port {port} after {_START_TIMEOUT_S:g} s")


@asynccontextmanager
async def ready_server(*command: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """Run ``command --port PORT``, with variables beside this process's own; gives its URL once its models answer."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(*command, "--port", str(port)),
        env=os.environ | _OWN_SETTINGS | dict(environ or {}),
        stdout=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        await until_ready(url, process)
        yield url
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
        await process.wait()


async def until_ready(
    url: str, process: asyncio.subprocess.Process, path: str = "/readyz", *, pause_s: float = 0.2
) -> None:
    """Wait until a server answers on ``path``.

    Raises
    ------
    SystemExit
        It ended before, or took too long.
    """
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    async with httpx.AsyncClient(timeout=_READY_TIMEOUT_S) as client:
        while time.monotonic() < deadline_s:
            with suppress(httpx.TransportError):
                if (await client.get(f"{url}{path}")).is_success:
                    return
            if process.returncode is not None:
                raise SystemExit(f"The server ended with status {process.returncode} before it answered.")
            await asyncio.sleep(pause_s)
    raise SystemExit(f"The server at {url} was not ready within {_READY_TIMEOUT_S:.0f} s.")


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(process_id: int) -> float:
    """CPU seconds of a process, all its threads, to the nanosecond where the kernel counts so (Linux)."""
    total_ns = 0
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9
