"""A running gateway for tests: real HTTP, a real database, backends that echo on script."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from backends.protocol import Backend, GenerateRequest
from backends.testing import EchoBackend, Script, ScriptSource
from classifier.types import Router
from gateway.app import create_app
from gateway.config.settings import Settings, load_settings
from gateway.store.records import RequestRecord
from tests.gateway.live import LiveServer
from tests.gateway.raw import PATIENCE_S

LADDER_TOML = """
[[tiers]]
name = "simple"
model = "small"
price_per_request_usd = 0.0001
price_per_compute_hour_usd = 2

[[tiers]]
name = "expert"
model = "large"
price_per_request_usd = 0.01
price_per_output_token_usd = 0.00001
price_per_compute_hour_usd = 2

[models.small]
kind = "echo"

[models.large]
kind = "echo"

[policies.careful]
allowed_tiers = ["expert"]

# The backends count what they are asked: only tests of the checks want them.
[verification]
enabled = false
"""

ECHO = Script()

ERROR_KEYS = {"message", "type", "param", "code"}


def make_settings(directory: Path, toml: str = LADDER_TOML, **overrides: Any) -> Settings:
    """Settings of a two-tier ladder; ``overrides`` are dotted paths with ``__`` for the dot."""
    file = directory / "suffice.toml"
    file.write_text(toml)
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_settings(file, environ={"HOME": str(directory)}, overrides=dotted)


@dataclass
class Gateway:
    """A gateway that is up. ``backends`` are its own objects, to be looked at afterwards."""

    app: Starlette
    settings: Settings
    client: httpx.AsyncClient
    url: str
    backends: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> Any:
        return self.app.state.parts

    async def rows(self) -> list[RequestRecord]:
        """The log, newest first."""
        found: list[RequestRecord] = await self.parts.store.recent(limit=1000)
        return found

    async def row(self) -> RequestRecord:
        """The one row there is."""
        (only,) = await self.rows()
        return only

    async def chat(self, content: str = "hello", **body: Any) -> httpx.Response:
        asked = {"model": "auto", "messages": [{"role": "user", "content": content}]} | body
        return await self.client.post("/v1/chat/completions", json=asked)

    def assert_idle(self) -> None:
        """No place, no generation and no row is left behind."""
        assert self.parts.admission.num_running == 0
        assert self.parts.admission.num_waiting == 0
        for backend in self.backends.values():
            if isinstance(backend, EchoBackend):
                assert backend.num_running == 0


def echo_backends(small: ScriptSource = ECHO, large: ScriptSource = ECHO, **options: Any) -> dict[str, Backend]:
    """The ladder's two models."""
    return {"small": EchoBackend("small", small, **options), "large": EchoBackend("large", large, **options)}


class Watched(EchoBackend):
    """Counts every way in which it is shown a text."""

    def __init__(self, model_id: str, script: ScriptSource = ECHO) -> None:
        super().__init__(model_id, script)
        self._num_read = 0

    async def score(self, prompt: GenerateRequest, answer: str) -> Any:
        self._num_read += 1
        return await super().score(prompt, answer)

    async def embed(self, texts: Any) -> Any:
        self._num_read += 1
        return await super().embed(texts)

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        self._num_read += 1
        return await super().count_tokens(request, limit=limit)

    @property
    def num_seen(self) -> int:
        return len(self.requests) + self._num_read


@asynccontextmanager
async def running(
    settings: Settings,
    backends: Mapping[str, Backend] | None = None,
    *,
    router: Router | None = None,
    seed: int = 0,
    send_buffer_bytes: int | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway behind a real uvicorn server on a free port, in this loop.

    ``send_buffer_bytes`` is for tests of clients that do not read, see :class:`tests.gateway.live.LiveServer`.
    """
    backends = echo_backends() if backends is None else backends
    app = create_app(settings, backends=backends, router=router, rng=random.Random(seed))
    async with (
        LiveServer(app, settings, send_buffer_bytes=send_buffer_bytes) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield Gateway(app, settings, client, url, backends)


def assert_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """The one shape of every error: OpenAI's, and Anthropic's below ``/v1/messages``."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    error: dict[str, Any] = body["error"]
    if response.request.url.path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(body) == {"type", "error", "request_id"}
        assert set(error) | {"param"} == ERROR_KEYS
    else:
        assert set(body) == {"error"}
        assert set(error) == ERROR_KEYS
    assert error["code"] == code, error
    assert error.get("param") == param, error
    assert "Traceback" not in error["message"]
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    return error


def events(text: str) -> list[str]:
    """The data of each event of a stream."""
    return [block[len("data: ") :] for block in text.split("\n\n") if block.startswith("data: ")]
