"""A provider to talk to, and the transports to do it over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from backends.remote.openai_backend import OpenAIBackend
from backends.testing import Script
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import ANSWER


@pytest.fixture(scope="module")
def server() -> Iterator[ProviderServer]:
    with ProviderServer(Script(text=ANSWER)) as running:
        yield running
        assert running.errors == []


@pytest.fixture(params=["httpx", "aiohttp"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "aiohttp":
        pytest.importorskip("aiohttp")
    return str(request.param)


@pytest.fixture
async def opened() -> AsyncIterator[list[OpenAIBackend]]:
    """Backends put in here are closed at the end."""
    backends: list[OpenAIBackend] = []
    yield backends
    for backend in backends:
        await backend.close()
