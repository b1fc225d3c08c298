"""Leaving: balancers hear of it before connections are refused, a person at a terminal does not wait."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from backends.testing import Script
from tests.gateway.harness import LADDER_TOML, echo_backends, make_settings, running
from tests.gateway.raw import eventually

ROOT = Path(__file__).parents[3]
ASK = {"model": "simple", "messages": [{"role": "user", "content": "hi"}]}

Server = tuple[asyncio.subprocess.Process, httpx.AsyncClient]


@pytest.fixture
async def server(tmp_path: Path, free_port: int) -> AsyncIterator[Server]:
    """A server that would be a lame duck for longer than any test waits."""
    config = tmp_path / "suffice.toml"
    config.write_text(f'data_dir = "{tmp_path}"\n{LADDER_TOML}\n[server]\nport = {free_port}\nlame_duck_s = 600\n')
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", timeout=60) as client:
            for _ in range(1200):
                try:
                    if (await client.get("/readyz")).status_code == 200:
                        break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_tells_balancers_while_requests_are_still_taken(server: Server) -> None:
    """The listener closed at once, so that "draining" could hardly be seen (security review L1)."""
    process, client = server
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        while (told := await client.get("/readyz")).status_code == 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    assert (told.status_code, told.json()["status"]) == (503, "draining")
    async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as late:
        assert (await late.get("/healthz")).status_code == 200
        assert (await late.post("/v1/chat/completions", json=ASK)).status_code == 200
    assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 0, "a second signal does not wait"


async def test_ctrl_c_does_not_wait(server: Server) -> None:
    process, _ = server
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_what_a_drain_cuts_off_is_told_so_and_logs_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Each stream that was cut off logged an ERROR with its traceback (security review L1)."""
    backends = echo_backends(small=Script(text="word " * 10_000, token_delay_s=0.01))
    with caplog.at_level(logging.INFO):
        async with running(make_settings(tmp_path, server__drain_timeout_s=1), backends) as gateway:
            asked = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=ASK | {"stream": stream}))
            await eventually(lambda: gateway.parts.admission.num_running == 1)
            gateway.app.state.server.should_exit = True
            answer = await asked
    assert "shutting_down" in answer.text
    assert answer.status_code == (200 if stream else 503)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
