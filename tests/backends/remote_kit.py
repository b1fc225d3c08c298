"""Helps tests of the remote backend make one, ask it and look at what came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

from backends.config import RemoteModelConfig, RetryConfig, TimeoutConfig
from backends.protocol import Finished, GenerateRequest, Message, SamplingParams, TokenDelta
from backends.remote.openai_backend import OpenAIBackend
from tests.backends.provider.server import ProviderServer

_IDS = count()
ANSWER = "The naïve 🦊 says: 2 + 2 = 4, 不是 5."
# Long where a busy machine could make a good server late, short where a test waits for silence to be noticed.
TIMEOUTS = TimeoutConfig(connect_s=10, first_token_s=20, gap_s=20, trailer_s=0.2, health_s=1)
HASTY = TimeoutConfig(connect_s=10, first_token_s=1.0, gap_s=0.5, trailer_s=0.2, health_s=1)
QUICK = RetryConfig(max_attempts=3, base_s=0.001, max_s=0.5)
ONCE = RetryConfig(max_attempts=1)
EVERYTHING = ("generate", "logprobs", "thinking", "embed", "score", "tokenize", "prompt_token_ids")


def make(server: ProviderServer, *behaviours: str, **options: Any) -> OpenAIBackend:
    api_key = options.pop("api_key", None)
    sleep = options.pop("sleep", asyncio.sleep)
    fields: dict[str, Any] = {"timeouts": TIMEOUTS, "retry": QUICK, "capabilities": EVERYTHING, "score_api": "vllm"}
    fields["health_check"] = "token"
    urls = tuple(server.url(behaviour) for behaviour in behaviours)
    config = RemoteModelConfig(urls=urls, model="provider-model", **{**fields, **options})
    return OpenAIBackend("far", config, api_key=api_key, rng=Random(7), sleep=sleep)


def chat(text: str = "What is 2 + 2?", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(f"r{next(_IDS)}", messages=(Message("user", text),), sampling=SamplingParams(**sampling))


async def collect(backend: OpenAIBackend, request: GenerateRequest) -> tuple[list[TokenDelta], Finished]:
    events = [event async for event in backend.generate(request)]
    endings = [event for event in events if isinstance(event, Finished)]
    assert len(endings) == 1
    assert events[-1] is endings[0]
    assert backend.load().running == 0
    return [event for event in events if isinstance(event, TokenDelta)], endings[0]


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that happens on the server's thread."""
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 - another loop's doing, so no event of this one
            await asyncio.sleep(0.005)


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def drain(backend: OpenAIBackend, request: GenerateRequest) -> None:
    """Run a request and look at nothing."""
    async for _ in backend.generate(request):
        pass
