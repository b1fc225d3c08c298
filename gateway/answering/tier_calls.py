"""From a decision to tokens: asks the chosen tier, and falls back while no token has come."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

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
from backends.protocol import Backend, Event, Finished, FinishReason, GenerateRequest, TokenDelta
from gateway.answering.exchange import Exchange
from gateway.answering.stream_merge import merge
from gateway.api.choice import Answer
from gateway.api.request import Prompt, Turn, messages_of, prompt_size
from gateway.edge.error_table import row_of
from gateway.errors import AnswerFailed
from gateway.models.catalog import Catalog
from gateway.store.records import Attempt
from policies.fallback import Outcome, fallback_flow
from policies.types import Tier

_log = logging.getLogger("suffice.serving")

Item = tuple[Answer, TokenDelta]

# Most specific first: an overloaded backend is also an unavailable one.
_OUTCOMES: tuple[tuple[type[BackendError], Outcome], ...] = (
    (BackendOverloaded, Outcome.OVERLOADED),
    (BackendUnavailable, Outcome.UNAVAILABLE),
    (BackendTimeout, Outcome.TIMED_OUT),
    (ContextLengthExceeded, Outcome.TOO_LONG),
    (UnsupportedByBackend, Outcome.REJECTED),
    (RequestRejected, Outcome.REJECTED),
)


@dataclass(frozen=True, slots=True)
class Begun:
    """A tier that answers: what came first (None where the answer is empty), and the rest."""

    first: Item | None
    rest: AsyncGenerator[Item, None]


async def begin(exchange: Exchange, catalog: Catalog) -> Begun:
    """Ask tier after tier until one begins to answer.

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
        try:
            return await ask(exchange, catalog, catalog.ladder[attempt.tier - 1])
        except BackendError as error:
            failure = error
        failures.append(failure)
        try:
            attempt = flow.send(_outcome(failure))
        except StopIteration as end:
            raise failures[end.value.decisive] from None


async def ask(exchange: Exchange, catalog: Catalog, tier: Tier) -> Begun:
    """Ask one tier, and wait until it begins to answer; the try is noted however it ends.

    Raises
    ------
    BackendError
        It failed before its first token.
    """
    begun_s = exchange.clock()
    exchange.asked_tier = tier
    rest = _answers(exchange, tier, catalog.backend(tier))
    try:
        first = await anext(rest, None)
    except BackendError as error:
        failure = error
    except Exception as error:
        # Whatever breaks inside a tier, the others may still answer.
        _log.exception("tier %d failed outside its contract", tier.index)
        failure = BackendFailure(f"Model {tier.model!r} failed: {type(error).__name__}.")
    else:
        exchange.attempts.append(Attempt(tier.index, tier.model, exchange.clock() - begun_s))
        return Begun(first, rest)
    duration_s = exchange.clock() - begun_s
    exchange.attempts.append(Attempt(tier.index, tier.model, duration_s, error=row_of(failure).code))
    raise failure


def _outcome(failure: BackendError) -> Outcome:
    for kind, outcome in _OUTCOMES:
        if isinstance(failure, kind):
            return outcome
    return Outcome.FAILED


async def _answers(exchange: Exchange, tier: Tier, backend: Backend) -> AsyncGenerator[Item, None]:
    """New text of every choice until all have ended well; the first event fixes the tier.

    Raises
    ------
    BackendError
        Before the first event.
    AnswerFailed
        After it.
    """
    exchange.answers = [
        Answer(index, scored=[] if exchange.is_watched else None) for index in range(exchange.request.num_choices)
    ]
    exchange.abandoned = {}
    answers = exchange.answers
    requests = _generate_requests(exchange, backend)
    if exchange.asked_s is None:
        exchange.asked_s = exchange.clock()
    if len(requests) == 1:
        answer = answers[0]
        async with aclosing(_stream(backend, requests[0])) as events:
            async for event in events:
                if (delta := _take(exchange, tier, answer, event)) is not None:
                    yield answer, delta
        return
    async with aclosing(merge([_stream(backend, request) for request in requests])) as merged:
        async for index, event in merged:
            answer = answers[index]
            if (delta := _take(exchange, tier, answer, event)) is not None:
                yield answer, delta


def _stream(backend: Backend, request: GenerateRequest) -> AsyncGenerator[Event, None]:
    # The protocol says "iterator" and "closing it frees everything": what can be closed is a generator.
    return cast("AsyncGenerator[Event, None]", backend.generate(request))


def _take(exchange: Exchange, tier: Tier, answer: Answer, event: Event) -> TokenDelta | None:
    """Note one event of the tier; what is to be shown of it."""
    if isinstance(event, TokenDelta):
        exchange.tier = tier
        if answer.scored is not None:
            event = answer.score(event, is_wanted=exchange.request.sampling.logprobs is not None)
        answer.add(event)
        exchange.note_tokens()
        return event
    is_failure = event.reason in (FinishReason.ERROR, FinishReason.CANCELLED)
    if is_failure and exchange.tier is None:
        raise BackendFailure(event.error or f"Model {tier.model!r} ended before its first token.")
    exchange.tier = tier
    answer.finished = event
    if is_failure:
        raise AnswerFailed(_what_failed(event))
    return None


def _what_failed(event: Finished) -> str:
    if event.reason is FinishReason.CANCELLED:
        return "The model was stopped before the answer was complete."
    return f"The model failed before the answer was complete: {event.error or 'no reason given'}."


def _generate_requests(exchange: Exchange, backend: Backend) -> list[GenerateRequest]:
    """One generation per choice; each seed is the first one's plus the choice's place, so choices differ."""
    request = exchange.request
    thinking = request.thinking
    if thinking is not None and "thinking" not in backend.capabilities:
        thinking = None
    num_choices = request.num_choices
    is_scored = exchange.is_watched and request.sampling.logprobs is None and "logprobs" in backend.capabilities
    generations = []
    for index in range(num_choices):
        sampling = request.sampling
        if is_scored:
            sampling = replace(sampling, logprobs=0)
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index % request.n)
        generations.append(
            GenerateRequest(
                exchange.request_id if num_choices == 1 else f"{exchange.request_id}-{index}",
                sampling=sampling,
                priority=request.preferences.priority,
                thinking=thinking,
                echo=request.echo,
                on_abandoned=exchange.note_abandoned(index),
                prediction=exchange.predictions[index] if exchange.predictions else request.prediction,
                **_prompt_argument(request.prompts[index // request.n]),
            )
        )
    return generations


def _prompt_argument(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt[0], Turn):
        return {"messages": messages_of(prompt)}
    return {"prompt_token_ids": prompt}


def probe_request(exchange: Exchange) -> GenerateRequest:
    """The exchange's longest prompt as a request that is only to be counted."""
    prompts = exchange.request.prompts
    longest = prompts[0] if len(prompts) == 1 else max(prompts, key=prompt_size)
    return GenerateRequest(exchange.request_id, **_prompt_argument(longest))
