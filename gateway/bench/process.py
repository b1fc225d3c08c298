"""Servers as processes of their own, and the CPU time they use."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_TIMEOUT_S = 60.0


@contextmanager
def program(module: str, *arguments: str, log: Path) -> Iterator[tuple[int, int]]:
    """Run ``python -m module --port PORT …``, its log lines into a file; gives (process id, port) once it answers."""
    port = _free_port()
    with log.open("wb") as lines:
        command = [sys.executable, "-m", module, "--port", str(port), *arguments]
        process = subprocess.Popen(command, stderr=lines)
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


def _free_port() -> int:
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
