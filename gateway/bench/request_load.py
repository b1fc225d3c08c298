"""A small closed-loop HTTP client: keep-alive connections that send the same request again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Holds what a run of identical requests took, as the client saw it."""

    num_requests: int
    wall_s: float
    p50_s: float
    p99_s: float


def post_bytes(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a complete HTTP/1.1 POST."""
    lines = [f"POST {path} HTTP/1.1", "host: bench", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def run_load(port: int, request: bytes, num_requests: int, num_connections: int) -> LoadResult:
    """Send ``num_requests`` over ``num_connections``, each waiting for its answer before the next.

    Raises
    ------
    RuntimeError
        An answer's status is not 200.
    """
    left = iter(range(num_requests))
    latencies_s: list[float] = []
    started_s = time.perf_counter()
    await asyncio.gather(*(_one(port, request, left, latencies_s) for _ in range(num_connections)))
    wall_s = time.perf_counter() - started_s
    latencies_s.sort()
    last = len(latencies_s) - 1
    return LoadResult(num_requests, wall_s, latencies_s[last // 2], latencies_s[round(last * 0.99)])


async def _one(port: int, request: bytes, left: object, latencies_s: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for _ in left:  # type: ignore[attr-defined]
            started_s = time.perf_counter()
            writer.write(request)
            await _read_answer(reader)
            latencies_s.append(time.perf_counter() - started_s)
    finally:
        writer.close()


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        rest = await reader.read(2000)
        raise RuntimeError(f"the server answered {head[:40]!r} … {rest!r}")
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        _, _, rest = lowered.partition(b"content-length: ")
        await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
