"""Fixtures that several rooms share: real PostgreSQL and Redis, SQLite files, servers in a thread, private clusters.

Services are required when ``CI`` or ``SUFFICE_REQUIRE_SERVICES`` is set; elsewhere tests that need an absent one are
skipped, and the summary names it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import asyncpg
import pytest
import redis
import uvicorn
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings

from gateway.config.store_section import StoreConfig
from gateway.store import migrate
from gateway.store.store import Store
from tests.faults import PrivatePostgres, TinyDisk

POSTGRES_URL = os.environ.get("SUFFICE_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# Databases 15, 14 ...: each process of a parallel run empties one of its own.
REDIS_URL = f"{os.environ.get('SUFFICE_TEST_REDIS_URL', 'redis://127.0.0.1:6379')}/{15 - _WORKER % 15}"
SERVICES_REQUIRED = bool(os.environ.get("CI") or os.environ.get("SUFFICE_REQUIRE_SERVICES"))

# A deadline is a timing assertion, and a busy machine would fail it.
hypothesis_settings.register_profile("suffice", deadline=None)
hypothesis_settings.load_profile("suffice")
# A mutant is killed by any failure, the same in every run: `python -m tests.mutants`.
hypothesis_settings.register_profile(
    "mutants", deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)

_absent: dict[str, str] = {}
T = TypeVar("T")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests: given out last, one would keep a single process busy at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["absent"] = _absent


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _absent.update(getattr(node, "workeroutput", {}).get("absent", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for service, problem in _absent.items():
        terminalreporter.section(f"{service} was not there: its tests were SKIPPED", red=True, bold=True)
        terminalreporter.line(f"{problem}. Start it with `make services`, or set SUFFICE_REQUIRE_SERVICES=1 to fail.")


def _absent_service(service: str, problem: BaseException) -> NoReturn:
    text = f"{service} does not answer: {problem!r}"
    if SERVICES_REQUIRED:
        pytest.fail(f"{text}; services are required here", pytrace=False)
    _absent[service] = text
    pytest.skip(text)


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread with a loop of its own, so that the test's loop is not touched."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _database(name: str) -> str:
    return f"{POSTGRES_URL.rsplit('/', 1)[0]}/{name}"


async def _execute(*statements: str) -> None:
    connection = await asyncpg.connect(POSTGRES_URL, timeout=5)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def postgres_template() -> Iterator[str]:
    """A migrated database that others are cloned from: migrations run once a session."""
    name = f"suffice_template_{uuid.uuid4().hex[:12]}"
    try:
        run_apart(_execute(f"CREATE DATABASE {name}"))
    except (OSError, TimeoutError, asyncpg.PostgresError) as problem:
        _absent_service("PostgreSQL", problem)
    run_apart(migrate.upgrade(_database(name)))
    yield name
    run_apart(_execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


@pytest.fixture
def empty_postgres_url(postgres_template: str) -> Iterator[str]:
    """A PostgreSQL database without tables, this test's own."""
    name = f"suffice_test_{uuid.uuid4().hex[:12]}"
    run_apart(_execute(f"CREATE DATABASE {name}"))
    yield _database(name)
    run_apart(_execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


@pytest.fixture
def postgres_url(postgres_template: str) -> Iterator[str]:
    """A migrated PostgreSQL database, this test's own."""
    name = f"suffice_test_{uuid.uuid4().hex[:12]}"
    run_apart(_execute(f"CREATE DATABASE {name} TEMPLATE {postgres_template}"))
    yield _database(name)
    run_apart(_execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    run_apart(migrate.upgrade(f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A migrated SQLite file, this test's own."""
    path = tmp_path / "suffice.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.db)])
def database_url(request: pytest.FixtureRequest) -> str:
    """Migrated; the test runs once per database."""
    name = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.db)])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Without tables (SQLite: without a file); the test runs once per database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    """An open store; the test runs once per database."""
    async with Store(StoreConfig(url=database_url)) as opened:
        yield opened


@pytest.fixture
def private_postgres(free_port: int) -> Iterator[PrivatePostgres]:
    """A running cluster that only this test knows, empty."""
    try:
        cluster = PrivatePostgres(free_port)
    except FileNotFoundError as problem:
        _absent_service("PostgreSQL", problem)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture
def tiny_disk() -> Iterator[TinyDisk]:
    """A disk to fill; ``resize`` mounts it."""
    disk = TinyDisk()
    yield disk
    disk.remove()


@pytest.fixture(scope="session")
def _redis_server() -> str:
    client = redis.Redis.from_url(REDIS_URL)
    try:
        client.ping()
    except redis.RedisError as problem:
        _absent_service("Redis", problem)
    finally:
        client.close()
    return REDIS_URL


@pytest.fixture
def redis_program() -> str:
    """The server's program, for tests that stop and start a Redis of their own."""
    program = shutil.which("redis-server")
    if program is None:
        _absent_service("redis-server", FileNotFoundError("redis-server is not installed"))
    return program


@pytest.fixture
def redis_url(_redis_server: str) -> Iterator[str]:
    """A Redis database, empty before and after."""
    client = redis.Redis.from_url(_redis_server)
    client.flushdb()
    yield _redis_server
    client.flushdb()
    client.close()


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on now, for servers that cannot be told to choose one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """``serve(app)`` runs an ASGI app in uvicorn, in a thread, and returns its base URL; stopped after the test."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any, **options: Any) -> str:
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, **options)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive(), "the server does not stop"
