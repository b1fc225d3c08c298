"""From a decision to tokens: asks the chosen tier, falls back while no token has come, then streams."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendTimeout,
    BackendUnavailable,
    ContextLengthExceeded,
    RequestRejected,
    UnsupportedByBackend,
)
from backends.protocol import Backend, Event, Finished, FinishReason, GenerateRequest
from gateway.answer import Answer
from gateway.api_request import Prompt
from gateway.catalog import Catalog
from gateway.errors import row_of
from gateway.exchange import Exchange
from gateway.merge import merge
from gateway.store.records import Attempt
from policies.fallback import Outcome, fallback_flow
from policies.types import Tier

_log = logging.getLogger("suffice.serving")

# Most specific first: an overloaded backend is also an unavailable one.
_OUTCOMES: tuple[tuple[type[BackendError], Outcome], ...] = (
    (BackendOverloaded, Outcome.OVERLOADED),
    (BackendUnavailable, Outcome.UNAVAILABLE),
    (BackendTimeout, Outcome.TIMED_OUT),
    (ContextLengthExceeded, Outcome.TOO_LONG),
    (UnsupportedByBackend, Outcome.REJECTED),
    (RequestRejected, Outcome.REJECTED),
)


async def serve(exchange: Exchange, catalog: Catalog) -> AsyncGenerator[tuple[Answer, Event], None]:
    """Yield every event of every choice. The first one fixes the tier.

    Raises
    ------
    BackendError
        Every tier tried failed before its first token; of all failures the one the caller can do most about.
    """
    assert exchange.decision is not None, "decide first"
    flow = fallback_flow(exchange.decision)
    attempt = next(flow)
    failures: list[BackendError] = []
    while True:
        tier = catalog.ladder[attempt.tier - 1]
        begun_s = exchange.clock()
        exchange.asked_tier = tier
        try:
            async with aclosing(_answers(exchange, tier, catalog.backend(tier))) as events:
                async for answer, event in events:
                    if exchange.tier is None:
                        _commit(exchange, tier, begun_s)
                    yield answer, event
            return
        except BackendError as error:
            if exchange.tier is not None:
                raise
            failure = error
        except Exception as error:
            if exchange.tier is not None:
                raise
            # Whatever breaks inside a tier, the others may still answer.
            _log.exception("tier %d failed outside its contract", tier.index)
            failure = BackendFailure(f"Model {tier.model!r} failed: {type(error).__name__}.")
        failures.append(failure)
        duration_s = exchange.clock() - begun_s
        exchange.attempts.append(Attempt(tier.index, tier.model, duration_s, error=row_of(failure).code))
        try:
            attempt = flow.send(_outcome(failure))
        except StopIteration as end:
            raise failures[end.value.decisive] from None


def _commit(exchange: Exchange, tier: Tier, begun_s: float) -> None:
    exchange.tier = tier
    exchange.attempts.append(Attempt(tier.index, tier.model, exchange.clock() - begun_s))


def _outcome(failure: BackendError) -> Outcome:
    for kind, outcome in _OUTCOMES:
        if isinstance(failure, kind):
            return outcome
    return Outcome.FAILED


async def _answers(exchange: Exchange, tier: Tier, backend: Backend) -> AsyncGenerator[tuple[Answer, Event], None]:
    """The events of one tier; failing at once where its very first event is a failure."""
    exchange.answers = [Answer(index) for index in range(exchange.request.num_choices)]
    exchange.abandoned.clear()
    requests = _generate_requests(exchange, backend)
    streams = [_stream(backend, request) for request in requests]
    if exchange.asked_s is None:
        exchange.asked_s = exchange.clock()
    if len(streams) == 1:
        answer = exchange.answers[0]
        async with aclosing(streams[0]) as events:
            async for event in events:
                _take(exchange, answer, event)
                yield answer, event
        return
    async with aclosing(merge(streams)) as merged:
        async for index, event in merged:
            answer = exchange.answers[index]
            _take(exchange, answer, event)
            yield answer, event


def _stream(backend: Backend, request: GenerateRequest) -> AsyncGenerator[Event, None]:
    # The protocol says "iterator" and "closing it frees everything": what can be closed is a generator.
    return cast("AsyncGenerator[Event, None]", backend.generate(request))


def _take(exchange: Exchange, answer: Answer, event: Event) -> None:
    if isinstance(event, Finished):
        if event.reason is FinishReason.ERROR and exchange.tier is None:
            raise BackendFailure(event.error or "The model failed before its first token.")
        answer.finished = event
        return
    answer.add(event)
    exchange.note_tokens()


def _generate_requests(exchange: Exchange, backend: Backend) -> list[GenerateRequest]:
    """One generation per choice; each seed is the first one's plus the choice's place, so choices differ."""
    request = exchange.request
    thinking = request.thinking if "thinking" in backend.capabilities else None
    generations = []
    for index in range(request.num_choices):
        sampling = request.sampling
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index % request.n)
        generations.append(
            GenerateRequest(
                exchange.request_id if request.num_choices == 1 else f"{exchange.request_id}-{index}",
                sampling=sampling,
                priority=request.wishes.priority,
                thinking=thinking,
                echo=request.echo,
                on_abandoned=exchange.note_abandoned(index),
                **_prompt_argument(request.prompts[index // request.n]),  # type: ignore[arg-type]
            )
        )
    return generations


def _prompt_argument(prompt: Prompt) -> Mapping[str, Prompt]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt[0], int):
        return {"prompt_token_ids": prompt}
    return {"messages": prompt}


def probe_request(exchange: Exchange) -> GenerateRequest:
    """The exchange's longest prompt as a request that is only to be counted."""
    longest = max(exchange.request.prompts, key=_size)
    return GenerateRequest(exchange.request_id, **_prompt_argument(longest))  # type: ignore[arg-type]


def _size(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(1 if isinstance(each, int) else len(each.content) for each in prompt)
