"""Kill the server under load, again and again; then look in its log for every answer a client saw finished.

Each round: a server process, many concurrent clients (every fourth request is not streamed), and ``SIGKILL`` at a
random moment. A client counts an answer as finished when it has read ``data: [DONE]``, or a whole JSON body. After the
last restart each of them must be in the log, with the tokens the client was told.

``python -m gateway.bench.durability --kills 20 --json [--database-url postgresql://...]``

What it does not show: loss of power. A killed process leaves the kernel alive, so data that was written but not synced
survives; see docs/log.md for what ``database.sqlite_sync`` does about that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.bench.child_server import free_port, until_ready
from gateway.bench.machine_card import card, print_card
from gateway.config.store_section import StoreConfig
from gateway.store.store import Store
from gateway.store.urls import parse_database_url

_START_TIMEOUT_S = 120.0
_PROMPT = "What is 23 plus 45? And say these words again, please: one two three four five six seven eight"


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """An answer that a client saw to its end."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class DurabilityTally:
    """Counts what the clients saw over all rounds, and what the log says about it."""

    finished: list[ReceivedAnswer] = field(default_factory=list)
    num_cut: int = 0
    num_refused: int = 0
    restart_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class ServerProcess:
    """A server as a process of its own, started by a command that takes ``--port`` (and ``--database-url``)."""

    def __init__(self, command: Sequence[str], database_url: str | None = None) -> None:
        self._port = free_port()
        self._command = [*command, "--port", str(self._port)]
        if database_url is not None:
            self._command += ["--database-url", database_url]
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    async def start(self) -> float:
        """Start it; seconds until it is ready to answer."""
        begun = time.perf_counter()
        self._process = await asyncio.create_subprocess_exec(*self._command)
        try:
            await until_ready(self.url, self._process, "/healthz", pause_s=0.02)
        except SystemExit:
            await self.kill()
            raise
        return time.perf_counter() - begun

    async def kill(self) -> None:
        """``SIGKILL``: no handler runs, no buffer is flushed."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


async def measure(
    command: Sequence[str], database_url: str, *, kills: int, streams: int, seed: int, model: str = "auto"
) -> DurabilityTally:
    """Run all rounds and search the log.

    Parameters
    ----------
    command : starts the server, less its port and database
    database_url : an empty or earlier log
    kills : rounds
    streams : concurrent clients
    seed : of the moments of the kills
    model : what the clients ask for
    """
    rng = random.Random(seed)
    tally = DurabilityTally()
    for _ in range(kills):
        server = ServerProcess(command, database_url)
        tally.restart_s.append(await server.start())
        try:
            await _load_until(server, tally, model, streams, rng.uniform(0.2, 1.2))
        finally:
            await server.kill()
    # One more start: the log is looked at as a restarted server has it, recovery done.
    server = ServerProcess(command, database_url)
    tally.restart_s.append(await server.start())
    try:
        await _search_log(database_url, tally)
    finally:
        await server.kill()
    return tally


async def _load_until(
    server: ServerProcess, tally: DurabilityTally, model: str, streams: int, kill_after_s: float
) -> None:
    """Load the server, and kill it ``kill_after_s`` after its first finished answer of this round."""
    first = asyncio.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
        clients = [asyncio.create_task(_ask_forever(client, tally, model, first, place)) for place in range(streams)]
        try:
            await asyncio.wait_for(first.wait(), _START_TIMEOUT_S)
            await asyncio.sleep(kill_after_s)
            await server.kill()
            await asyncio.wait_for(asyncio.gather(*clients), _START_TIMEOUT_S)
        finally:
            for task in clients:
                task.cancel()


async def _ask_forever(
    client: httpx.AsyncClient, tally: DurabilityTally, model: str, first: asyncio.Event, place: int
) -> None:
    """Ask until the connection dies. What was read before that counts."""
    for turn in range(1_000_000):
        body = {"model": model, "messages": [{"role": "user", "content": f"{_PROMPT} {place} {turn}"}]}
        try:
            if turn % 4 == 3:
                answer = await _ask_whole(client, body)
            else:
                answer = await _ask_stream(client, body)
        except httpx.HTTPError:
            tally.num_cut += 1
            return
        if answer is None:
            tally.num_refused += 1
        else:
            tally.finished.append(answer)
            first.set()


async def _ask_whole(client: httpx.AsyncClient, body: dict[str, Any]) -> ReceivedAnswer | None:
    response = await client.post("/v1/chat/completions", json=body)
    return _seen(response, response.json()["usage"]) if response.is_success else None


async def _ask_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> ReceivedAnswer | None:
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    usage: dict[str, int] = {}
    seen: ReceivedAnswer | None = None
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        if not response.is_success:
            await response.aread()
            return None
        try:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    seen = _seen(response, usage)
                elif line.startswith("data: "):
                    usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
        except httpx.HTTPError:
            # Cut between [DONE] and the end of the body: the client has its answer.
            if seen is None:
                raise
    return seen


def _seen(response: httpx.Response, usage: dict[str, int]) -> ReceivedAnswer:
    return ReceivedAnswer(
        response.headers["x-suffice-request-id"], usage.get("prompt_tokens", -1), usage.get("completion_tokens", -1)
    )


async def _search_log(database_url: str, tally: DurabilityTally) -> None:
    async with Store(StoreConfig(url=database_url)) as store:
        for answer in tally.finished:
            row = await store.get_request(answer.request_id)
            if row is None:
                tally.lost.append(answer.request_id)
            elif (row.prompt_tokens, row.completion_tokens, row.error_code) != (
                answer.prompt_tokens,
                answer.completion_tokens,
                None,
            ):
                tally.wrong.append(answer.request_id)


def check_integrity(database_url: str) -> str:
    """SQLite's own examination of the file; PostgreSQL has checked itself while recovering."""
    path = parse_database_url(database_url).path
    if path is None:
        return "not applicable"
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    finally:
        connection.close()


def report(tally: DurabilityTally, database_url: str, *, kills: int, streams: int, seed: int) -> dict[str, Any]:
    """Return the figures of a run as one flat JSON object."""
    return {
        "bench": "durability",
        "database": parse_database_url(database_url).dialect,
        "kills": kills,
        "streams": streams,
        "seed": seed,
        "num_finished": len(tally.finished),
        "num_cut_by_kill": tally.num_cut,
        "num_refused": tally.num_refused,
        "num_lost": len(tally.lost),
        "num_wrong": len(tally.wrong),
        "integrity": check_integrity(database_url),
        "restart_s_p50": round(statistics.median(tally.restart_s), 3),
        "restart_s_max": round(max(tally.restart_s), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when nothing was lost, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database-url", help="by default a new SQLite file")
    parser.add_argument("--models", choices=("echo", "builtin"), default="echo", help="who answers")
    parser.add_argument("--model", default="auto", help="what the clients ask for")
    parser.add_argument("--token-delay-s", type=float, default=0.005, help="of the echoing models")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args(argv)
    command = [sys.executable, "-P", "-m", "gateway.bench.echo_server", "--models", options.models]
    command += ["--token-delay-s", str(options.token_delay_s)]
    facts = card()
    if not options.json:
        print_card("durability: SIGKILL under load", facts)
    with tempfile.TemporaryDirectory(prefix="suffice-durability-") as folder:
        url = options.database_url or f"sqlite:///{Path(folder) / 'log.db'}"
        load = {"kills": options.kills, "streams": options.streams, "seed": options.seed}
        tally = asyncio.run(measure(command, url, model=options.model, **load))
        figures = {"models": options.models, "model": options.model} | report(tally, url, **load)
    print(json.dumps(figures | {"card": facts}))
    is_sound = (
        not tally.lost and not tally.wrong and tally.finished and figures["integrity"] in {"ok", "not applicable"}
    )
    return 0 if is_sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
