"""What every drill needs: a real server to be hurt, somebody who watches its health, and a report that fails loudly.

A drill is a program: it prints a table of what it saw, then one line of JSON, and ends with status 1 where a promise
broke. All traffic stays on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.bench.machine_card import card, print_card
from gateway.commands.result_printer import print_table

ROOT = Path(__file__).parents[2]
START_S = 180.0


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command_line() -> list[str]:
    """Return how ``suffice`` of the checkout in ``PYTHONPATH`` is called, whatever lies in the working directory."""
    return [sys.executable, "-P", "-m", "gateway.cli"]


def environment(home: Path, tree: Path) -> dict[str, str]:
    """Return the environment of a process of a checkout: no settings of ours, and a home of its own."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SUFFICE_", "HF_"))}
    return ours | {"OMP_NUM_THREADS": "1", "HOME": str(home), "PYTHONPATH": str(tree)}


@dataclass
class Server:
    """A gateway in a process of its own, with its own folder.

    Parameters
    ----------
    folder : where configuration, log lines and, by default, the database lie
    toml : its configuration
    max_file_bytes : no file of the process may grow beyond it, as on a full disk
    environ : added to the process's environment
    tree : the checkout whose server it is
    cwd : where it runs, by default in its checkout; nothing is imported from there
    """

    folder: Path
    toml: str
    max_file_bytes: int | None = None
    environ: dict[str, str] = field(default_factory=dict)
    tree: Path = ROOT
    cwd: Path | None = None
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """All that it has written to its standard error."""
        return (self.folder / "log").read_text(errors="replace")

    def database_url(self) -> str:
        return f"sqlite:///{self.folder}/suffice.db"

    async def start(self) -> None:
        """Start it and wait until it answers."""
        config = self.folder / "suffice.toml"
        config.write_text(self.toml)
        with (self.folder / "log").open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *command_line(),
                *("serve", "--config", str(config), "--port", str(self.port)),
                cwd=self.cwd or self.tree,
                env=environment(self.folder, self.tree) | self.environ,
                stdout=output,
                stderr=output,
            )
        async with httpx.AsyncClient(base_url=self.url, timeout=5) as client:
            deadline = time.monotonic() + START_S
            while True:
                with suppress(httpx.HTTPError):
                    if (await client.get("/healthz")).status_code == 200:
                        return
                if self.process.returncode is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server does not start:\n{self.log[-3000:]}")
                await asyncio.sleep(0.05)

    def limit_files(self, max_bytes: int) -> None:
        """Let no file of the running process grow beyond this; -1 for any size."""
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)

    async def kill(self) -> None:
        """End it as a power cut does."""
        assert self.process is not None, "started before"
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """End it in order; its exit status."""
        assert self.process is not None, "started before"
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            return await asyncio.wait_for(self.process.wait(), 60)
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL

    def rss_bytes(self) -> int:
        """Memory that it holds now."""
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    @property
    def _pid(self) -> int:
        assert self.process is not None, "started before"
        return self.process.pid


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[Server]:
    """Start a server, and end it whatever happens."""
    await server.start()
    try:
        yield server
    finally:
        if server.process is not None and server.process.returncode is None:
            await server.stop()


@dataclass
class HealthWatch:
    """Asks ``/healthz`` again and again, as a supervisor does that restarts what does not answer."""

    url: str
    every_s: float = 0.05
    waits_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    @property
    def longest_ms(self) -> float:
        return 1000 * max(self.waits_s, default=0.0)

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.waits_s)
        return 1000 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[HealthWatch]:
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            while True:
                begun_s = time.perf_counter()
                try:
                    answer = await client.get("/healthz")
                    self.num_failed += answer.status_code != 200
                except httpx.HTTPError:
                    self.num_failed += 1
                self.waits_s.append(time.perf_counter() - begun_s)
                await asyncio.sleep(self.every_s)


@dataclass
class Report:
    """Gathers what a drill saw, and which promises it kept."""

    name: str
    seed: int
    rows: list[tuple[str, ...]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, promise: str, is_kept: bool, found: object = "") -> None:
        """Note whether a promise was kept."""
        if not is_kept:
            self.broken.append(f"{promise}: {found}" if found != "" else promise)

    def end(self, headings: Sequence[str]) -> int:
        """Print everything; the exit status."""
        facts = card()
        print_card(f"drill {self.name}, seed {self.seed}", facts)
        print_table(headings, self.rows)
        for promise in self.broken:
            print(f"BROKEN  {promise}")
        found = {"drill": self.name, "seed": self.seed, **self.figures, "broken": self.broken}
        print(json.dumps(found | {"card": facts}, default=str))
        return 1 if self.broken else 0


def statuses(counts: Mapping[Any, int]) -> str:
    """Return counts in one cell, the most frequent first."""
    return ", ".join(f"{num} x {key}" for key, num in sorted(counts.items(), key=lambda each: -each[1])) or "none"


def error_problem(status: int, content_type: str, retry_after: str | None, body: Any) -> str | None:
    """Return what is wrong with the shape of an error; None where it is as all others."""
    if status == 405 and body is None:
        return None
    if content_type != "application/json":
        return f"content-type {content_type!r}"
    if not isinstance(body, dict) or set(body) != {"error"} or not isinstance(body["error"], dict):
        return "no error object"
    if set(body["error"]) != {"message", "type", "param", "code"}:
        return f"members {sorted(body['error'])}"
    if "Traceback" in str(body["error"]["message"]):
        return "a traceback in the message"
    if status in (429, 503) and not (retry_after or "").isdigit():
        return "no Retry-After"
    return None


async def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Wait until a condition holds; whether it did in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
