"""Findings of work without bound: long prompts, floods, slow clients, a log that nobody reads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from tests.drills.kit import Server, running, statuses
from tests.drills.reproductions.stage import (
    CHAT,
    ECHO,
    KEYS,
    LOCAL,
    QUIET,
    Found,
    Parts,
    Stage,
    add_key,
    asking,
    client_of,
    connected,
    moment,
    reproduces,
    status_of,
    waits_while,
    write_sqlite,
)

_LONG_BYTES = 3_960_000


def _long_body(text: str) -> bytes:
    return json.dumps(asking(text, "tier-1", max_tokens=1)).encode()


def _posting(
    server: Server, path: str, body: bytes, headers: dict[str, str] | None = None
) -> Callable[[], Awaitable[str]]:
    async def post() -> str:
        async with client_of(server, headers) as client:
            return await status_of(client.post(path, content=body))

    return post


@reproduces("H1", "3.96 MB of words for a context of 1,024, five times with a key of one request a minute")
async def long_prompt(stage: Stage) -> Found:
    body, parts = _long_body("word " * (_LONG_BYTES // 5)), Parts()
    async with stage.serving(LOCAL + QUIET + KEYS) as server:
        headers = await add_key(server, requests_per_minute=1)
        waits, first = await waits_while(server, _posting(server, CHAT, body, headers))
        parts.note(waits.is_blocked, str(waits))
        told = Counter([first, *[await _posting(server, CHAT, body, headers)() for _ in range(4)]])
        parts.note(not any(each.startswith("429") for each in told), statuses(told))
    return parts.found()


@reproduces("H2", "3.79 MB for embeddings, in 430 inputs and in one")
async def long_inputs(stage: Stage) -> Found:
    many = ["word " * (3_790_000 // 430 // 5)] * 430
    parts = Parts()
    async with stage.serving(LOCAL + QUIET) as server:
        for inputs in (many, ["word " * (_LONG_BYTES // 5)]):
            body = json.dumps({"model": "tier-1", "input": inputs}).encode()
            waits, told = await waits_while(server, _posting(server, "/v1/embeddings", body))
            parts.note(waits.is_blocked, f"{len(inputs)} inputs: {told}, {waits}")
    return parts.found()


@reproduces("S1", "4.1 MB of digits for a context of 1,024")
async def long_digits(stage: Stage) -> Found:
    async with stage.serving(LOCAL + QUIET) as server:
        waits, told = await waits_while(server, _posting(server, CHAT, _long_body("1234567890" * 410_000)))
    return Found(waits.is_blocked, f"{told}, {waits}")


@reproduces("L4", "3.9 MB of [] in an unknown field")
async def many_brackets(stage: Stage) -> Found:
    body = json.dumps(asking("hi") | {"x": [[]] * 975_000}, separators=(",", ": ")).encode()
    async with stage.serving(ECHO + QUIET) as server:
        waits, told = await waits_while(server, _posting(server, CHAT, body))
    return Found(told == "200", f"{told}, {waits}")


@reproduces("H8", "500 reports of 75 KB with a key of one request a minute; 250,000 labels and a look each second")
async def feedback_flood(stage: Stage) -> Found:
    parts = Parts()
    watched = QUIET.replace("[monitor]\nenabled = false", "[monitor]\nevery_s = 1.0")
    server = stage.server(ECHO + watched + KEYS)
    async with running(server):
        headers = await add_key(server, requests_per_minute=1)
        async with client_of(server, headers) as client:
            answer = await client.post(CHAT, json=asking("hi"))
            request_id = answer.headers["x-suffice-request-id"]
            comment = "x" * 37_000
            report = {"request_id": request_id, "kind": "reference", "reference": comment, "comment": comment}
            told = Counter([await status_of(client.post("/v1/feedback", json=report)) for _ in range(500)])
        parts.note(told["200"] > 400, f"reports: {statuses(told)}")
    _add_labels(server, request_id, 250_000)
    async with running(server):
        await asyncio.sleep(2.0)
        waits, _ = await waits_while(server, lambda: asyncio.sleep(8.0))
        # The labels may be in the way of calm as well: the longest is held against an absolute here.
        parts.note(waits.longest_s >= 1.0, f"labels: {waits}")
    return parts.found()


def _add_labels(server: Server, request_id: str, num: int) -> None:
    now = moment()
    rows = [(str(uuid.uuid4()), request_id, 1, "feedback", float(place % 2), now, "") for place in range(num)]
    names = "gold_id, request_id, tier, source, label, created_at, note"
    write_sqlite(server, f"INSERT INTO gold_labels ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


@reproduces("M4", "60 connections of a key of one request a minute hold 4 MiB less 100 bytes each")
async def slow_uploads(stage: Stage) -> Found:
    size = 4 * 2**20
    async with stage.serving(ECHO + QUIET + KEYS) as server, AsyncExitStack() as stack:
        headers = await add_key(server, requests_per_minute=1)
        before = server.rss_bytes()
        head = _head(headers["authorization"], size)
        answers = []
        for _ in range(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(lambda each: each.transport.abort(), writer)  # a writer that nobody holds closes itself
            # From the start: what came before a reset is lost after it.
            answers.append(asyncio.ensure_future(reader.readline()))
            with suppress(ConnectionError, TimeoutError):
                writer.write(head + b" " * (size - 100))
                async with asyncio.timeout(5.0):
                    await writer.drain()
        await asyncio.sleep(10.0)
        growth = server.rss_bytes() - before
        ended = [each for each in answers if each.done()]
        told = Counter(_told(each) for each in ended)
        for each in answers:
            each.cancel()
    seen = f"{60 - len(ended)} of 60 held, the others {statuses(told)}, memory grew by {growth / 2**20:.0f} MiB"
    return Found(growth > 150 * 2**20, seen)


def _told(answer: asyncio.Future[bytes]) -> str:
    """Return the status of an answer's first line; how it ended where there is none."""
    if error := answer.exception():
        return type(error).__name__
    return answer.result().decode("latin-1")[9:12] or "closed"


def _head(authorization: str, num_bytes: int) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: {authorization}\r\n"
        f"content-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
    ).encode()


@reproduces("S7", "a body of one byte each half second; request_timeout_s 5, slow_client_timeout_s 2")
async def dripped_body(stage: Stage) -> Found:
    limits = "[server]\nrequest_timeout_s = 5.0\nslow_client_timeout_s = 2.0\n"
    async with stage.serving(ECHO + QUIET + limits) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\n\r\n".encode())
        reading, begun_s = asyncio.ensure_future(reader.readline()), time.monotonic()
        while not reading.done() and time.monotonic() - begun_s < 20.0:
            with suppress(ConnectionError):
                writer.write(b" ")
                await writer.drain()
            await asyncio.sleep(0.5)
        lasted_s, is_open = time.monotonic() - begun_s, not reading.done()
        told = b"" if is_open else reading.result()
        reading.cancel()
        writer.transport.abort()
    return Found(is_open, f"{'still open' if is_open else told.decode().strip()} after {lasted_s:.1f} s")


@reproduces("M8", "16 places and 32 waiting, all taken by tenant A; then tenant B asks")
async def greedy_tenant(stage: Stage) -> Found:
    slow = ECHO.replace('kind = "echo"', 'kind = "echo"\nfirst_delay_s = 3.0')
    places = "[server]\nmax_concurrency = 16\nqueue_limit = 32\n"
    async with stage.serving(slow + QUIET + KEYS + places) as server:
        greedy, modest = await add_key(server, "a"), await add_key(server, "b")
        async with client_of(server, greedy) as flood, client_of(server, modest) as client:
            await status_of(flood.get("/v1/models"))
            asked = [asyncio.ensure_future(status_of(flood.post(CHAT, json=asking("hi")))) for _ in range(60)]
            await asyncio.sleep(2.0)
            told = await status_of(client.post(CHAT, json=asking("hi")))
            await asyncio.gather(*asked)
    return Found(told.startswith("429"), f"tenant B is told {told}")


@reproduces("S2", "three times what the server can take, for 20 s, at the default limits")
async def overload(stage: Stage) -> Found:
    rng, served, refused = random.Random(1), list[float](), 0
    # One sequence at a time, so that a fast machine has no more room than a slow one.
    toml = LOCAL + "max_num_seqs = 1\n" + QUIET
    async with stage.serving(toml) as server, client_of(server, timeout_s=120.0) as client:
        body = asking("Tell me about the sea.", "tier-1", max_tokens=256, ignore_eos=True)

        async def ask() -> None:
            nonlocal refused
            begun_s = time.monotonic()
            answer = await client.post(CHAT, json=body)
            if answer.status_code == 200:
                served.append(time.monotonic() - begun_s)
            else:
                refused += answer.status_code in (429, 503)

        await ask()
        served.clear()
        for _ in range(4):
            await ask()
        one_s = sum(served) / len(served)
        served.clear()
        begun_s, asked = time.monotonic(), []
        while time.monotonic() - begun_s < 20.0:
            asked.append(asyncio.ensure_future(ask()))
            await asyncio.sleep(rng.expovariate(3.0 / one_s))
        await asyncio.gather(*asked)
    longest_s = max(served, default=0.0)
    in_time = sum(each <= 10.0 for each in served)
    seen = f"offered {len(asked)}, refused {refused}, answered within 10 s {in_time}, longest {longest_s:.1f} s"
    return Found(refused < len(asked) // 10, seen)


@reproduces("M12", "400 requests while nobody reads the log's pipe")
async def stalled_log(stage: Stage) -> Found:
    server = stage.server(ECHO + QUIET)
    pipe = server.folder / "log"
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDWR)
    try:
        async with running(server), client_of(server, timeout_s=15.0) as client:
            told: Counter[str] = Counter()
            for _ in range(400):
                told[await status_of(client.post(CHAT, json=asking("hi")))] += 1
                if told["ReadTimeout"]:
                    break
            health = await status_of(client.get("/healthz"))
            if health != "200":
                await server.kill()
    finally:
        os.close(holder)
    return Found(health != "200" or told["ReadTimeout"] > 0, f"{statuses(told)}; then /healthz: {health}")


@reproduces("L13", "300 requests with one unknown key, 300 with another each; look-ups that PostgreSQL counts")
async def unknown_keys(stage: Stage) -> Found:
    url, parts = await stage.cluster.database(), Parts()
    async with stage.serving(ECHO + QUIET + KEYS, url) as server:
        for kind in ("one key", "another each"):
            before = await _lookups(url)
            async with client_of(server) as client:
                for place in range(300):
                    secret = "sk-suffice-" + ("x" * 40 if kind == "one key" else f"{place:040}")
                    answer = await client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
                    assert answer.status_code in (401, 429), answer.text
            num = await _lookups(url) - before
            parts.note(num >= 290, f"{kind}: {num} look-ups")
    return parts.found()


async def _lookups(url: str) -> int:
    await asyncio.sleep(2.0)  # PostgreSQL brings its counters up to date once a second
    statement = "SELECT seq_scan + coalesce(idx_scan, 0) AS num FROM pg_stat_user_tables WHERE relname = 'api_keys'"
    async with connected(url) as connection:
        return int((await connection.fetchrow(statement))["num"])
