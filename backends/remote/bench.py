"""Measures what a remote backend costs this process: CPU time per request and per streamed chunk, by transport.

``python -m backends.remote.bench`` plays a provider in a process of its own and measures only the client's CPU time,
so a busy machine changes the figures little. It prints a card, a table with ratios, and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import httpx
import orjson

from backends.config import RemoteModelConfig
from backends.protocol import GenerateRequest, Message, SamplingParams
from backends.remote.openai_backend import OpenAIBackend
from backends.remote.transport import has_aiohttp

_PACKAGES = ("httpx", "aiohttp", "uvicorn", "uvloop", "httptools")


@dataclass(frozen=True, slots=True)
class TransportCost:
    """Holds the CPU milliseconds per request of ``num_chunks`` streamed chunks, at some concurrency."""

    name: str
    concurrency: int
    num_chunks: int
    cpu_ms: float


def serve(port_file: str) -> None:
    """Serve canned streams until killed; the path's first part is the number of chunks."""
    import uvicorn

    async def app(scope: dict, receive: Callable, send: Callable) -> None:  # type: ignore[type-arg]
        assert scope["type"] == "http"
        while (await receive()).get("more_body"):
            pass
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for at in range(int(scope["path"].split("/")[1])):
            await send({"type": "http.response.body", "body": _CHUNK % at, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": _TAIL, "more_body": False})

    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", interface="asgi3")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    with open(port_file, "w", encoding="ascii") as file:
        file.write(str(socket.getsockname()[1]))
    server.run([socket])


_CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word%d"},"finish_reason":null}]}\n\n'  # noqa: E501
_TAIL = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'  # noqa: E501
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":50}}\n\n'  # noqa: E501
    b"data: [DONE]\n\n"
)


async def measure(
    name: str, one: Callable[[], Awaitable[None]], *, concurrency: int, num_chunks: int, num_requests: int
) -> TransportCost:
    """Run ``one`` some hundred times, ``concurrency`` at once, and return its share of this process's CPU time."""

    async def worker(count: int) -> None:
        for _ in range(count):
            await one()

    async def run(count: int) -> None:
        await asyncio.gather(*(worker(count // concurrency) for _ in range(concurrency)))

    await run(max(concurrency, num_requests // 4))
    began_s = time.process_time()
    await run(num_requests)
    num_done = num_requests // concurrency * concurrency
    cpu_ms = 1e3 * (time.process_time() - began_s) / num_done
    return TransportCost(name, concurrency, num_chunks, round(cpu_ms, 4))


def backend_call(base: str, num_chunks: int, transport: str) -> tuple[Callable[[], Awaitable[None]], OpenAIBackend]:
    """Return a call of the whole remote backend over one transport."""
    config = RemoteModelConfig(urls=(f"{base}/{num_chunks}/v1",), model="m", transport=transport)  # type: ignore[arg-type]
    backend = OpenAIBackend("m", config)
    request = GenerateRequest(
        "r", messages=(Message("user", "What is 2 + 2? " * 16),), sampling=SamplingParams(max_tokens=64)
    )

    async def one() -> None:
        async for _ in backend.generate(request):
            pass

    return one, backend


def bare_call(base: str, num_chunks: int, client: httpx.AsyncClient) -> Callable[[], Awaitable[None]]:
    """Return the least that httpx can do: post, and read the bytes."""
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "What is 2 + 2? " * 16}]})

    async def one() -> None:
        async with client.stream("POST", f"{base}/{num_chunks}/v1/chat/completions", content=body) as response:
            async for _ in response.aiter_bytes():
                pass

    return one


async def bench(base: str, *, num_requests: int) -> list[TransportCost]:
    """Measure every transport at 1 and 32 at once, with 1 and 50 chunks."""
    costs = []
    transports = ["httpx", *(["aiohttp"] if has_aiohttp() else [])]
    for concurrency in (1, 32):
        for num_chunks in (1, 50):
            sizes = {"concurrency": concurrency, "num_chunks": num_chunks, "num_requests": num_requests}
            async with httpx.AsyncClient(trust_env=False) as client:
                costs.append(await measure("httpx alone", bare_call(base, num_chunks, client), **sizes))
            for transport in transports:
                one, backend = backend_call(base, num_chunks, transport)
                costs.append(await measure(f"backend over {transport}", one, **sizes))
                await backend.close()
    return costs


def card(num_requests: int) -> dict[str, str | int]:
    """Return what the figures hold for."""
    found: dict[str, str | int] = {"python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return {**found, "num_requests": num_requests}


def report(costs: list[TransportCost]) -> None:
    """Print the table: milliseconds per request, and microseconds per chunk from 1 to 50 chunks."""
    by_key = {(cost.name, cost.concurrency, cost.num_chunks): cost.cpu_ms for cost in costs}
    print(f"{'client':<24}{'at once':>8}{'ms/request':>12}{'ms/50 chunks':>14}{'us/chunk':>10}")
    for name, concurrency in dict.fromkeys((cost.name, cost.concurrency) for cost in costs):
        short, long = by_key[name, concurrency, 1], by_key[name, concurrency, 50]
        print(f"{name:<24}{concurrency:>8}{short:>12.3f}{long:>14.3f}{1e3 * (long - short) / 49:>10.1f}")


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=640)
    parser.add_argument("--serve", metavar="PORT_FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-P", "-m", "backends.remote.bench", "--serve", str(port_file)]
        with subprocess.Popen(command) as server:
            try:
                while not port_file.exists() or not port_file.read_text():
                    time.sleep(0.05)
                base = f"http://127.0.0.1:{port_file.read_text()}"
                costs = asyncio.run(bench(base, num_requests=arguments.requests))
            finally:
                server.terminate()
    facts = card(arguments.requests)
    print(" ".join(f"{key}={value}" for key, value in facts.items()))
    report(costs)
    print(json.dumps({"bench": "backends.remote", "card": facts, "costs": [asdict(cost) for cost in costs]}))


if __name__ == "__main__":
    main()
