"""The public fake: its script is obeyed to the letter."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import BackendFailure, BackendOverloaded, BackendUnavailable, ContextLengthExceeded
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
from backends.testing import EchoBackend, Script, split_tokens


def chat(text: str, **sampling: object) -> GenerateRequest:
    return GenerateRequest("r", messages=(Message("user", text),), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


async def collect(backend: EchoBackend, request: GenerateRequest) -> tuple[list[TokenDelta], Finished]:
    events: list[Event] = [event async for event in backend.generate(request)]
    ending = events.pop()
    assert isinstance(ending, Finished)
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert len(deltas) == len(events)
    return deltas, ending


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(st.text())
def test_tokens_joined_are_the_text(text: str) -> None:
    assert "".join(split_tokens(text)) == text


async def test_it_is_a_backend_and_echoes() -> None:
    backend = EchoBackend()
    assert isinstance(backend, Backend)
    deltas, ending = await collect(backend, chat("What is 2 + 2?"))
    assert text_of(deltas) == "What is 2 + 2?"
    assert ending.reason is FinishReason.STOP
    assert ending.usage.completion_tokens == sum(delta.num_tokens for delta in deltas) == 6
    assert (backend.num_running, backend.num_finished) == (0, 1)


async def test_stop_and_length() -> None:
    backend = EchoBackend(script=Script(text="one two three"))
    deltas, ending = await collect(backend, chat("x", stop=(" three",)))
    assert (text_of(deltas), ending.reason) == ("one two", FinishReason.STOP)
    deltas, ending = await collect(backend, chat("x", max_tokens=1))
    assert (text_of(deltas), ending.reason) == ("one", FinishReason.LENGTH)
    _, ending = await collect(backend, chat("x", max_tokens=100, ignore_eos=True))
    assert (ending.usage.completion_tokens, ending.reason) == (100, FinishReason.LENGTH)


async def test_reasoning_is_counted_and_can_be_turned_off() -> None:
    backend = EchoBackend(script=Script(text="4", reasoning="2 and 2"))
    deltas, ending = await collect(backend, chat("2 + 2"))
    assert "".join(delta.reasoning for delta in deltas) == "2 and 2"
    assert (ending.usage.reasoning_tokens, ending.usage.completion_tokens) == (3, 4)
    quiet = GenerateRequest("r", messages=(Message("user", "2 + 2"),), thinking=False)
    deltas, ending = await collect(backend, quiet)
    assert (text_of(deltas), ending.usage.reasoning_tokens) == ("4", 0)


async def test_failures_before_and_after_the_first_token() -> None:
    scripts = [Script(fail_before=BackendFailure("boom")), Script(text="a b c", fail_after=2), Script()]
    backend = EchoBackend(script=scripts)
    with pytest.raises(BackendFailure, match="boom"):
        await collect(backend, chat("x"))
    deltas, ending = await collect(backend, chat("x"))
    assert (text_of(deltas), ending.reason) == ("a b", FinishReason.ERROR)
    assert ending.error == "scripted failure after 2 tokens"
    _, ending = await collect(backend, chat("x"))
    assert ending.reason is FinishReason.STOP
    assert (backend.num_failed, backend.num_finished) == (2, 1)


async def test_a_hang_ends_by_cancelling_or_closing() -> None:
    backend = EchoBackend(script=Script(text="a b c", hang_after=1))
    bills: list[Finished] = []
    task = asyncio.create_task(collect(backend, replace(chat("x"), on_abandoned=bills.append)))
    await asyncio.sleep(0.01)
    assert backend.num_running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (backend.num_running, backend.num_cancelled) == (0, 1)
    assert [(bill.reason, bill.usage.completion_tokens) for bill in bills] == [(FinishReason.CANCELLED, 1)]

    task = asyncio.create_task(collect(backend, chat("x")))
    await asyncio.sleep(0)
    await backend.close()
    _, ending = await task
    assert ending.reason is FinishReason.CANCELLED
    with pytest.raises(BackendUnavailable):
        await collect(backend, chat("x"))


async def test_limits_are_refused_with_their_numbers() -> None:
    backend = EchoBackend(context_length=4)
    with pytest.raises(ContextLengthExceeded) as caught:
        await collect(backend, chat("a b c", max_tokens=2))
    assert (caught.value.num_prompt_tokens, caught.value.context_length, caught.value.max_tokens) == (3, 4, 2)
    full = EchoBackend(max_running=0)
    with pytest.raises(BackendOverloaded) as overloaded:
        await collect(full, chat("a"))
    assert overloaded.value.retry_after_s == 1.0


async def test_delays_go_through_the_injected_sleep() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await collect(EchoBackend(script=Script(text="a b", first_delay_s=3.0, token_delay_s=0.5), sleep=sleep), chat("x"))
    assert slept == [3.0, 0.5, 0.5]


async def test_logprobs_embeddings_scores_and_health() -> None:
    backend = EchoBackend()
    deltas, ending = await collect(backend, chat("a b", logprobs=2, prompt_logprobs=1))
    assert [entry.token for delta in deltas for entry in delta.logprobs] == ["a", " b"]
    assert all(len(entry.top) == 2 for delta in deltas for entry in delta.logprobs)
    assert ending.prompt_logprobs is not None
    assert ending.prompt_logprobs[0] is None
    vectors = (await backend.embed(["a b", ""])).vectors
    assert all(isclose(sum(x * x for x in vector), 1.0) for vector in vectors)
    assert len((await backend.score(chat("q"), "a b c")).logprobs) == 3
    assert (await backend.health()).ok
    broken = EchoBackend(script=Script(fail_before=BackendFailure("down")))
    assert not (await broken.health()).ok
