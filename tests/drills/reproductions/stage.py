"""What every probe needs: a server of the checkout under test, keys, its command line, its database, a stopwatch.

All that a probe learns comes from outside the process: answers, files, memory, exit statuses and the database. Keys are
written into the database, since the command that makes them differs between checkouts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import httpx

from tests.drills.kit import HealthWatch, Server, command_line, environment, free_port, running
from tests.faults import PrivatePostgres

T = TypeVar("T")

QUIET = """
[learning]
enabled = false
[monitor]
enabled = false
[verification]
enabled = false
"""
ECHO = """
[[tiers]]
name = "low"
model = "small"
price_per_request_usd = 0.0001
region = "eu"
[[tiers]]
name = "high"
model = "large"
price_per_request_usd = 0.01
region = "us"
[models.small]
kind = "echo"
[models.large]
kind = "echo"
"""
LOCAL = """
[[tiers]]
name = "tier-1"
model = "one"
price_per_request_usd = 0.0001
[models.one]
path = "builtin:tier1"
kv_cache_bytes = 67_108_864
threads = 1
"""
KEYS = '[auth]\nrequired = "always"\nkey_cache_s = 0\n'
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe saw, and whether the finding is still open."""

    is_open: bool
    seen: str


@dataclass(slots=True)
class Parts:
    """Gathers the parts of a finding; one that is open leaves all of it open."""

    is_open: bool = False
    seen: list[str] = field(default_factory=list)

    def note(self, is_open: bool, seen: str) -> None:
        self.is_open |= is_open
        self.seen.append(seen)

    def found(self) -> Found:
        return Found(self.is_open, "; ".join(self.seen))


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    status: int | None
    output: str


@dataclass
class Stage:
    """Where one probe acts: a checkout, and a folder of its own."""

    tree: Path
    folder: Path
    cluster: Cluster

    @asynccontextmanager
    async def serving(self, toml: str, url: str | None = None, **options: Any) -> AsyncIterator[Server]:
        """Run the checkout's server; the log lies in SQLite unless a database is named."""
        server = self.server(toml, url, **options)
        async with running(server):
            yield server

    def server(self, toml: str, url: str | None = None, **options: Any) -> Server:
        folder = self.folder / f"server-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        database = f'\n[database]\nurl = "{url or f"sqlite:///{folder}/suffice.db"}"\nconnect_timeout_s = 2.0\n'
        return Server(folder, toml + database, tree=self.tree, **options)

    async def command(self, *arguments: str, seconds: float = 120.0, **environ: str) -> Done:
        """Run ``suffice``; its status is None where it did not end in time."""
        process = await asyncio.create_subprocess_exec(
            *command_line(),
            *arguments,
            cwd=self.folder,
            env=environment(self.folder, self.tree) | environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        reading = asyncio.ensure_future(process.communicate())
        done, _ = await asyncio.wait({reading}, timeout=seconds)
        if not done:
            process.kill()
        output, _ = await reading
        return Done(process.returncode if done else None, output.decode(errors="replace"))


@dataclass
class Cluster:
    """A PostgreSQL of the drill's own, started when first asked for."""

    _cluster: PrivatePostgres | None = None
    _num_made: int = 0

    async def database(self) -> str:
        """Make an empty database; returns its URL."""
        if self._cluster is None:
            cluster = await asyncio.to_thread(PrivatePostgres, free_port())
            await asyncio.to_thread(cluster.start)
            self._cluster = cluster
        self._num_made += 1
        name = f"probe_{self._num_made}"
        async with connected(self._cluster.url) as connection:
            await connection.execute(f"CREATE DATABASE {name}")
        return self._cluster.url.rpartition("/")[0] + f"/{name}"

    async def remove(self) -> None:
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.remove)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    """Open a connection to PostgreSQL."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


class Proxy:
    """A TCP proxy before a server on this machine, that can be cut as a cable is."""

    def __init__(self, port: int) -> None:
        self.target, self.port = port, free_port()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """Close every connection, and take no more."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0.1)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, far_writer}
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        self._writers -= {writer, far_writer}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


def sqlite_path(server: Server) -> Path:
    return server.folder / "suffice.db"


def read_sqlite(server: Server, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Read from a server's SQLite file."""
    connection = sqlite3.connect(sqlite_path(server), timeout=30)
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.close()


def write_sqlite(server: Server, statement: str, rows: list[tuple[Any, ...]]) -> None:
    """Write to a server's SQLite file."""
    connection = sqlite3.connect(sqlite_path(server), timeout=30)
    try:
        connection.executemany(statement, rows)
        connection.commit()
    finally:
        connection.close()


def moment(when: datetime | None = None) -> str:
    """Return a time as the SQLite file holds it."""
    return (when or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M:%S.%f")


_KEY_COLUMNS = ("key_id", "name", "key_hash", "prefix", "tenant", "created_at", "limits", "scope")


async def add_key(
    server: Server, tenant: str = "default", scope: str = "use", url: str | None = None, **limits: Any
) -> dict[str, str]:
    """Write a key into the database; returns the header that sends it."""
    secret = f"sk-suffice-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    now = datetime.now(UTC)
    row = (str(uuid.uuid4()), "probe", digest, secret[:16], tenant, now, json.dumps(limits), scope)
    names = ", ".join(_KEY_COLUMNS)
    if url is None:
        values = ", ".join("?" for _ in row)
        shown = [moment(each) if isinstance(each, datetime) else each for each in row]
        write_sqlite(server, f"INSERT INTO api_keys ({names}) VALUES ({values})", [tuple(shown)])
    else:
        values = ", ".join(f"${place}" for place in range(1, len(row) + 1))
        async with connected(url) as connection:
            await connection.execute(f"INSERT INTO api_keys ({names}) VALUES ({values})", *row)
    return {"authorization": f"Bearer {secret}"}


def client_of(server: Server, headers: dict[str, str] | None = None, timeout_s: float = 60.0) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=400)
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=timeout_s, limits=limits)


def asking(content: str, model: str = "auto", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


async def status_of(request: Awaitable[httpx.Response]) -> str:
    """Return an answer's status and error code, or how it failed."""
    try:
        answer = await request
    except httpx.HTTPError as error:
        return type(error).__name__
    with suppress(ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.json()['error']['code']}"
    return str(answer.status_code)


def message_of(answer: httpx.Response) -> str:
    """Return an error's message; the body where it has none."""
    with suppress(ValueError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])
    return answer.text


@dataclass(frozen=True, slots=True)
class Waits:
    """How long ``/healthz`` took at most: in calm, and while something was done."""

    calm_s: float
    longest_s: float

    @property
    def is_blocked(self) -> bool:
        """Whether the server stood still: seconds against milliseconds, whatever the machine's speed."""
        return self.longest_s >= 1.5 and self.longest_s >= 8 * self.calm_s

    def __str__(self) -> str:
        return f"/healthz waited {1000 * self.longest_s:,.0f} ms (calm: {1000 * self.calm_s:,.0f} ms)"


async def waits_while(server: Server, act: Callable[[], Awaitable[T]]) -> tuple[Waits, T]:
    """Watch ``/healthz`` in calm for a second, then while something is done."""
    calm, watch = HealthWatch(server.url, every_s=0.02), HealthWatch(server.url, every_s=0.02)
    async with calm.watching():
        await asyncio.sleep(1.0)
    begun_s = time.monotonic()
    async with watch.watching():
        await asyncio.sleep(0.1)
        result = await act()
        await asyncio.sleep(0.1)
    # Without any answer it waited all the time.
    longest_s = max(watch.waits_s, default=time.monotonic() - begun_s)
    return Waits(max(calm.waits_s, default=0.0), longest_s), result


async def read_for(reader: asyncio.StreamReader, seconds: float, most: int = 2**20) -> bytes:
    """Read what comes within a time, or until the end."""
    found = b""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            while len(found) < most and (piece := await reader.read(2**16)):
                found += piece
    return found


async def exchange(server: Server, data: bytes, seconds: float = 20.0) -> bytes:
    """Send bytes on a connection of their own; returns what came back until the server closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        return await read_for(reader, seconds)
    finally:
        writer.transport.abort()


Probe = Callable[[Stage], Awaitable[Found]]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One finding's reproduction: what is done, and what does it."""

    finding: str
    deed: str
    act: Probe


REPRODUCTIONS: dict[str, Reproduction] = {}


def reproduces(finding: str, deed: str) -> Callable[[Probe], Probe]:
    """Register a probe."""

    def register(act: Probe) -> Probe:
        REPRODUCTIONS[finding] = Reproduction(finding, deed, act)
        return act

    return register
