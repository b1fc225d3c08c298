"""Streams are written delta by delta, and end in order with the process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.testing import Script
from tests.gateway.harness import LADDER_TOML, Gateway, echo_backends, events, make_settings, running
from tests.gateway.raw import PATIENCE_S, until_refused

BODY = {"model": "expert", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


async def writes(gateway: Gateway) -> list[bytes]:
    """The pieces that the application hands to the server for one stream."""
    content = json.dumps(BODY).encode()
    messages = iter([{"type": "http.request", "body": content, "more_body": False}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-length", str(len(content)).encode())],
        "client": ("127.0.0.1", 50_000),
    }
    await gateway.app(scope, receive, send)
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


@pytest.mark.parametrize("delay_s", [None, 0.0], ids=["ready", "waiting"])
async def test_each_delta_of_a_model_is_a_write_of_its_own(tmp_path: Path, delay_s: float | None) -> None:
    """Backends join what came together; nothing holds a delta back for the next."""
    backends = echo_backends(large=Script(text=" ".join(["word"] * 200), token_delay_s=delay_s))
    async with running(make_settings(tmp_path), backends) as gateway:
        pieces = await writes(gateway)
        assert sum(piece.count(b'word"') for piece in pieces) == 200
        assert 200 <= len(pieces) <= 202
        assert b"[DONE]" in pieces[-1]


@pytest.mark.slow
async def test_sigterm_lets_a_stream_finish_and_ends_the_process_in_order(tmp_path: Path, free_port: int) -> None:
    toml = LADDER_TOML.replace('[models.large]\nkind = "echo"', '[models.large]\nkind = "echo"\ntoken_delay_s = 0.05')
    config = tmp_path / "suffice.toml"
    config.write_text(f'data_dir = "{tmp_path}"\n{toml}\n[server]\nport = {free_port}\nlame_duck_s = 0\n')
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "serve", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(*command, stderr=log, cwd=Path(__file__).parents[3])
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", timeout=30) as client:
            for _ in range(600):
                try:
                    if (await client.get("/readyz")).status_code == 200:
                        break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
            messages = [{"role": "user", "content": "word " * 30}]
            async with client.stream("POST", "/v1/chat/completions", json=BODY | {"messages": messages}) as response:
                pieces = response.aiter_text()
                text = await anext(pieces)
                process.send_signal(signal.SIGTERM)
                await until_refused(f"http://127.0.0.1:{free_port}")
                text += "".join([piece async for piece in pieces])
        assert events(text)[-1] == "[DONE]"
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0, (tmp_path / "log").read_text()
        assert b"Traceback" not in (tmp_path / "log").read_bytes()
    finally:
        log.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
