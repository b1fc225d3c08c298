"""Servers as processes of their own: two gateways and a Redis that can be stopped and started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]


@dataclass
class ServerProcess:
    """A gateway in a process."""

    url: str
    client: httpx.AsyncClient
    process: asyncio.subprocess.Process

    async def control(self) -> dict[str, Any]:
        """What it says of what is in force."""
        found: dict[str, Any] = (await self.client.get("/readyz")).json()["control"]
        return found

    async def chat(self, **body: Any) -> httpx.Response:
        asked = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]} | body
        return await self.client.post("/v1/chat/completions", json=asked)

    async def until(self, **wanted: Any) -> float:
        """Seconds until it says so."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while loop.time() - begun_s < 60:
            found = await self.control()
            if all(found[name] == value for name, value in wanted.items()):
                return loop.time() - begun_s
            await asyncio.sleep(0.005)
        raise AssertionError(f"{self.url} never said {wanted}: {found}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def gateway_process(config: Path, port: int, log: Path) -> AsyncIterator[ServerProcess]:
    """A gateway that answers; ended with SIGTERM."""
    url = f"http://127.0.0.1:{port}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("SUFFICE_")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--port", str(port)),
            cwd=ROOT,
            env=env | {"OMP_NUM_THREADS": "1", "SUFFICE_SERVER__LAME_DUCK_S": "0"},
            stdout=output,
            stderr=output,
        )
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            for _ in range(6000):
                assert process.returncode is None, f"it ended; see {log}"
                try:
                    if (await client.get("/readyz")).status_code == 200:
                        break
                except httpx.HTTPError:
                    await asyncio.sleep(0.02)
            yield ServerProcess(url, client, process)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)


class RedisProcess:
    """A Redis of this test alone."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *("redis-server", "--port", str(self.port), "--save", "", "--dir", str(self._folder)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for _ in range(1000):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                await writer.wait_closed()
                return
        raise AssertionError("Redis does not start")

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None
