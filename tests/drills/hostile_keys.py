"""Eight keys do their worst at once; see that health is answered and that a modest key is served.

::

    python -m tests.drills.hostile_keys --seconds 60 --seed 1
    python -m tests.drills.hostile_keys --echo            # models that answer at once, for the edge alone

Promises: ``/healthz`` is never later than 250 ms, a modest key's requests are all answered with 200, nobody is told
500, memory grows by 300 MB at most, and the server ends in order. The first is meant for a quiet machine;
``--health-ms`` is for others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.drills.fuzz import make_key
from tests.drills.kit import HealthWatch, Report, Server, running, statuses
from tests.gateway.harness import LADDER_TOML

_CHAT = "/v1/chat/completions"
_MAX_GROWTH_BYTES = 300 * 2**20
_MODEST_PAUSE_S = 0.25
_MORE = """
[auth]
required = "always"
[learning]
enabled = false
[log]
level = "warning"
"""


_SMALL_KV = "[devices.cpu]\nkv_bytes = 67_108_864\n"


@dataclass
class Key:
    """One caller: its secret, and what it was told."""

    name: str
    secret: str
    url: str
    port: int
    rng: random.Random
    told: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)

    def client(self, timeout_s: float = 60.0) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.secret}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s, verify=False)

    async def post(self, client: httpx.AsyncClient, path: str, body: bytes | object) -> httpx.Response | None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        begun_s = time.perf_counter()
        try:
            answer = await client.post(path, content=content)
        except httpx.HTTPError as error:
            self.told[type(error).__name__] += 1
            return None
        self.waits_s.append(time.perf_counter() - begun_s)
        self.told[str(answer.status_code)] += 1
        return answer

    async def connect(self, receive_bytes: int | None = None) -> asyncio.StreamWriter:
        """Open a bare connection."""
        raw = socket.socket()
        raw.setblocking(False)
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        _, writer = await asyncio.open_connection(sock=raw, limit=2**12)
        return writer

    def head(self, num_bytes: int) -> bytes:
        return (
            f"POST {_CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self.secret}\r\n"
            f"content-length: {num_bytes}\r\n\r\n"
        ).encode()


def _ask(content: str, **more: object) -> dict[str, object]:
    return {"model": "auto", "messages": [{"role": "user", "content": content}], "max_tokens": 16, **more}


async def _forever(key: Key, num_clients: int, one: Callable[[httpx.AsyncClient], Awaitable[object]]) -> None:
    async def work() -> None:
        async with key.client() as client:
            while True:
                await one(client)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(work())


async def long_prompts(key: Key) -> None:
    word = "".join(key.rng.choices("abcdefghij ", k=1000))
    bodies = [_ask(word * 3900), _ask("1234567890" * 100_000), _ask(" " * 2_000_000)]
    encoded = [json.dumps(body).encode() for body in bodies]
    await _forever(key, 2, lambda client: key.post(client, _CHAT, key.rng.choice(encoded)))


async def deep_brackets(key: Key) -> None:
    plain = json.dumps(_ask("hi"))[:-1].encode()
    bodies = [
        plain + b',"x":[' + b"[]," * 1_200_000 + b"[]]}",
        plain + b',"x":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}",
        plain + b',"x":{' + b",".join(b'"%d":{}' % number for number in range(300_000)) + b"}}",
    ]
    await _forever(key, 2, lambda client: key.post(client, _CHAT, key.rng.choice(bodies)))


async def slow_uploads(key: Key) -> None:
    async def drip() -> None:
        while True:
            with suppress(OSError):
                writer = await key.connect()
                writer.write(key.head(4_000_000) + b'{"x":"' + b"a" * 2_000_000)
                try:
                    while not writer.is_closing():
                        writer.write(b"a")
                        await writer.drain()
                        await asyncio.sleep(0.5)
                    key.told["closed by the server"] += 1
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(drip())


async def slow_reads(key: Key) -> None:
    body = json.dumps(_ask("count to a thousand " * 20, stream=True, n=4)).encode()

    async def stall() -> None:
        while True:
            with suppress(OSError):
                writer = await key.connect(receive_bytes=2048)
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(key.head(len(body)) + body)
                key.told["not read"] += 1
                await asyncio.sleep(5.0)
                writer.transport.abort()

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(stall())


async def feedback_flood(key: Key) -> None:
    async with key.client() as client:
        answer = await key.post(client, _CHAT, _ask("hi"))
    request_id = answer.headers.get("x-suffice-request-id", "") if answer is not None else ""
    report = {"request_id": request_id, "kind": "reference", "reference": "r" * 60_000, "comment": "c" * 10_000}
    await _forever(key, 4, lambda client: key.post(client, "/v1/feedback", report))


async def many_connections(key: Key) -> None:
    """A thousand that send half a head, opened anew as they are closed."""

    async def hold() -> None:
        while True:
            with suppress(OSError):
                writer = await key.connect()
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: ")
                key.told["opened"] += 1
                await asyncio.sleep(key.rng.uniform(2.0, 8.0))
                writer.close()
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for _ in range(1000):
            group.create_task(hold())


async def queue_hog(key: Key) -> None:
    await _forever(key, 64, lambda client: key.post(client, _CHAT, _ask("What is 17 + 25?", max_tokens=200)))


async def wrong_paths(key: Key) -> None:
    async def one(client: httpx.AsyncClient) -> None:
        with suppress(httpx.HTTPError):
            path = "/v1/" + "x" * key.rng.randrange(2000)
            key.told[str((await client.get(path)).status_code)] += 1

    await _forever(key, 4, one)


HOSTILE: Mapping[str, Callable[[Key], Awaitable[None]]] = {
    "long prompts": long_prompts,
    "deep brackets": deep_brackets,
    "slow uploads": slow_uploads,
    "slow reads": slow_reads,
    "feedback flood": feedback_flood,
    "many connections": many_connections,
    "queue hog": queue_hog,
    "wrong paths": wrong_paths,
}


async def modest(key: Key) -> None:
    """A request now and then, as an ordinary application makes them."""
    async with key.client() as client:
        while True:
            await key.post(client, _CHAT, _ask("What is 2 plus 3?"))
            await asyncio.sleep(_MODEST_PAUSE_S)


async def _start_attackers(keys: Sequence[Key], seed: int, seconds: float) -> list[asyncio.subprocess.Process]:
    """One process a key: what they do to themselves must not be taken for what they do to the server."""
    found = []
    for key in keys:
        given = {"name": key.name, "secret": key.secret, "url": key.url, "port": key.port}
        options = ["--attack", json.dumps(given), "--seed", str(seed), "--seconds", str(seconds)]
        command = [sys.executable, "-m", "tests.drills.hostile_keys", *options]
        found.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
    return found


async def _attack(key: Key, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(HOSTILE[key.name](key), seconds)


async def drill(folder: Path, seed: int, seconds: float, toml: str, health_ms: float, names: list[str]) -> Report:
    """Run all at once for a time."""
    report = Report("hostile_keys", seed)
    server = Server(folder, f'{toml}{_MORE}\n[database]\nurl = "sqlite:///{folder}/suffice.db"\n')
    async with running(server):
        keys = {}
        for place, name in enumerate(["modest", *names]):
            secret = await make_key(folder, "use")
            keys[name] = Key(name, secret, server.url, server.port, random.Random(seed + place))
        watch = HealthWatch(server.url)
        warm_bytes = server.rss_bytes()
        attackers = await _start_attackers([keys[name] for name in names], seed, seconds + 5.0)
        asking = asyncio.create_task(modest(keys["modest"]))
        async with watch.watching():
            # They are processes too, and their imports take a moment.
            await asyncio.sleep(seconds + 5.0)
        growth_bytes = server.rss_bytes() - warm_bytes
        asking.cancel()
        for name, attacker in zip(names, attackers, strict=True):
            told, _ = await attacker.communicate()
            report.check(f"the drill's own {name!r} runs to the end", attacker.returncode == 0, told[-300:])
            if attacker.returncode == 0:
                found = json.loads(told)
                keys[name].told.update(found["told"])
                keys[name].waits_s = found["waits_s"]
        report.check("the server ends in order", await server.stop() == 0)
    for key in keys.values():
        longest_s = max(key.waits_s, default=0.0)
        median_s = statistics.median(key.waits_s) if key.waits_s else 0.0
        report.rows.append((key.name, statuses(key.told), f"{median_s:.2f} s", f"{longest_s:.2f} s"))
        report.check(f"{key.name} is told no 500", not key.told["500"], key.told["500"])
    asked, p99 = f"{len(watch.waits_s)} asked", f"p99 {watch.p99_ms:.0f} ms"
    report.rows.append(("/healthz", asked, p99, f"{watch.longest_ms:.0f} ms"))
    report.rows.append(("memory", f"{growth_bytes / 2**20:+.0f} MB", "", ""))
    told = keys["modest"].told
    report.check("the modest key is served", set(told) == {"200"}, dict(told))
    report.check("/healthz answers", watch.num_failed == 0, watch.num_failed)
    report.check(f"/healthz within {health_ms:.0f} ms", watch.longest_ms <= health_ms, f"{watch.longest_ms:.0f} ms")
    report.check("memory grows by 300 MB at most", growth_bytes <= _MAX_GROWTH_BYTES, growth_bytes)
    report.figures = {
        "seconds": seconds,
        "healthz_longest_ms": round(watch.longest_ms),
        "healthz_p99_ms": round(watch.p99_ms),
        "modest_longest_s": round(max(keys["modest"].waits_s, default=0.0), 2),
        "rss_growth_mb": round(growth_bytes / 2**20),
    }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--echo", action="store_true", help="echoing models instead of the built-in ladder")
    parser.add_argument("--health-ms", type=float, default=250.0)
    parser.add_argument("--only", nargs="+", choices=list(HOSTILE), default=list(HOSTILE))
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack is not None:
        key = Key(**json.loads(given.attack), rng=random.Random(given.seed))
        asyncio.run(_attack(key, given.seconds))
        print(json.dumps({"told": key.told, "waits_s": key.waits_s}))
        return 0
    # KV memory fills with whatever is asked for, up to what it may have: so little that it does not show.
    toml = LADDER_TOML.replace("[verification]\nenabled = false\n", "") if given.echo else _SMALL_KV
    with tempfile.TemporaryDirectory(prefix="suffice-drill-") as folder:
        report = asyncio.run(drill(Path(folder), given.seed, given.seconds, toml, given.health_ms, given.only))
    return report.end(("who", "was told", "median", "longest"))


if __name__ == "__main__":
    sys.exit(main())
