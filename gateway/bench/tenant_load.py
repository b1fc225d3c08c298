"""An open-loop HTTP client: tenants that send at their own rates, whatever the server does."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

# Whoever has waited this long has given up.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One request, as its client saw it; ``status`` is 0 where no answer came in time."""

    sent_s: float
    took_s: float
    status: int
    has_retry_after: bool


@dataclass(slots=True)
class Tenant:
    """Sends requests of one key.

    Attributes
    ----------
    name : of the tenant
    greed : its part of the offered load
    requests : complete HTTP requests, one after the other
    """

    name: str
    greed: float
    requests: Iterator[bytes]
    _idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    async def ask(self, port: int) -> Reply:
        """Send one request, on a connection of its own or an idle one."""
        sent_s = time.perf_counter()
        request = next(self.requests)
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(request)
                    status, headers = await _read_answer(reader)
                except BaseException:
                    writer.close()
                    raise
        except (TimeoutError, OSError, EOFError):
            return Reply(sent_s, time.perf_counter() - sent_s, 0, has_retry_after=False)
        self._idle.append((reader, writer))
        return Reply(sent_s, time.perf_counter() - sent_s, status, b"\r\nretry-after: " in headers)

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop()[1].close()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, rest = head.partition(b"content-length: ")
    await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
    return int(head[9:12]), head


async def offer(tenant: Tenant, port: int, rate: float, seconds: float, rng: random.Random) -> list[Reply]:
    """Send at ``rate`` requests a second (Poisson), and wait for what was sent."""
    tasks: list[asyncio.Task[Reply]] = []
    next_s = time.perf_counter()
    ends_s = next_s + seconds
    while (next_s := next_s + rng.expovariate(rate)) < ends_s:
        await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
        tasks.append(asyncio.create_task(tenant.ask(port)))
    return [await task for task in tasks]


async def saturate(tenants: list[Tenant], port: int, num_connections: int, seconds: float) -> float:
    """Keep ``num_connections`` busy; returns answers a second, the first quarter of the time left out.

    Raises
    ------
    RuntimeError
        Nothing was answered.
    """
    clock = time.perf_counter
    begins_s, ends_s = clock() + seconds / 4, clock() + seconds
    num_answers = 0
    refused: Reply | None = None

    async def work(tenant: Tenant) -> None:
        nonlocal num_answers, refused
        while clock() < ends_s:
            reply = await tenant.ask(port)
            if reply.status == 200 and begins_s <= clock() < ends_s:
                num_answers += 1
            elif reply.status != 200:
                refused = reply
                await asyncio.sleep(0.05)

    await asyncio.gather(*(work(tenants[place % len(tenants)]) for place in range(num_connections)))
    if not num_answers:
        raise RuntimeError(f"the server answers nothing; the last of its refusals: {refused}")
    return num_answers / (ends_s - begins_s)
