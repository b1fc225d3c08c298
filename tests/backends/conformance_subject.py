"""Holds a backend under test, and the ways to run it and to look at what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from backends.errors import BackendError
from backends.protocol import (
    Backend,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    TokenDelta,
)

SETTLE_S = 5.0
"""A backend may take so long to let go of a request that is over."""


async def _nothing_runs(backend: Backend) -> bool:
    return backend.load().running == 0


@dataclass(frozen=True, slots=True)
class ConformanceSubject:
    """Holds a backend to be checked.

    Parameters
    ----------
    make : returns a fresh backend, not started
    traits : its capabilities, and of these what it also keeps: ``seed`` (the same seed, the same answer),
        ``ignore_eos``, ``exact_counts`` (deltas' ``num_tokens`` sum to the usage), ``context_limit`` (refuses what is
        too long), ``long_answers`` (the question below is answered with several deltas)
    question : a prompt whose greedy answer has at least six characters
    is_idle : whether a backend holds nothing for requests that are over; asked until it says yes, for some seconds
    """

    make: Callable[[], Backend]
    traits: frozenset[str]
    question: str = "Sort these names from A to Z: Paul, Anna, Carla, Ben, Henry."
    is_idle: Callable[[Backend], Awaitable[bool]] = _nothing_runs

    def request(self, **sampling: Any) -> GenerateRequest:
        """Return the question as a greedy chat request of at most 24 tokens, changed as asked."""
        options = {"temperature": 0.0, "max_tokens": 24, **sampling}
        return GenerateRequest(
            "conformance", messages=(Message("user", self.question),), sampling=SamplingParams(**options)
        )


@asynccontextmanager
async def started(subject: ConformanceSubject) -> AsyncIterator[Backend]:
    """Make, start, hand out and close; on the way out nothing may be held."""
    backend = subject.make()
    await backend.start()
    try:
        yield backend
        await assert_idle(subject, backend)
    finally:
        await backend.close()


async def assert_idle(subject: ConformanceSubject, backend: Backend) -> None:
    """Assert that a backend lets go of everything within some seconds."""
    async with asyncio.timeout(SETTLE_S):
        while not await subject.is_idle(backend):  # noqa: ASYNC110 - the engine's thread has no event of ours
            await asyncio.sleep(0.002)


async def collect(backend: Backend, request: GenerateRequest) -> tuple[list[TokenDelta], Finished]:
    """Run a request to its ending and hold the stream to what every stream owes."""
    events: list[Event] = [event async for event in backend.generate(request)]
    assert events, "a generation yields at least its ending"
    *deltas, ending = events
    assert isinstance(ending, Finished), f"the last event is {ending!r}, not the ending"
    for delta in deltas:
        assert isinstance(delta, TokenDelta), f"{delta!r} before the last event"
        assert delta.text or delta.reasoning or delta.logprobs or delta.num_tokens, "a delta with nothing in it"
        delta.text.encode("utf-8")
        delta.reasoning.encode("utf-8")
    _assert_books(ending)
    return [delta for delta in deltas if isinstance(delta, TokenDelta)], ending


def _assert_books(ending: Finished) -> None:
    usage, timings = ending.usage, ending.timings
    assert usage.prompt_tokens > 0, usage
    assert 0 <= usage.reasoning_tokens <= usage.completion_tokens, usage
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens, usage
    assert 0 <= usage.accepted_draft_tokens <= usage.draft_tokens, usage
    assert usage.accepted_prediction_tokens >= 0, usage
    assert usage.rejected_prediction_tokens >= 0, usage
    assert 0 <= timings.queue_s <= timings.total_s, timings
    assert 0 <= timings.ttft_s <= timings.total_s, timings
    assert timings.itl_s >= 0, timings
    assert ending.compute_s >= 0
    assert (ending.error is not None) == (ending.reason is FinishReason.ERROR), ending


def text_of(deltas: Iterable[TokenDelta]) -> str:
    """Return the visible text of some deltas."""
    return "".join(delta.text for delta in deltas)


async def refuses(backend: Backend, request: GenerateRequest, kind: type[BackendError]) -> BackendError:
    try:
        await collect(backend, request)
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got an answer")
