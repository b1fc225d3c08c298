"""From a decision to tokens: asks the chosen tier, and falls back while no token has come."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

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
from gateway.access.call_cost import covered
from gateway.answering.phases import Answer
from gateway.answering.request_router import prompt_argument
from gateway.answering.stream_merge import merge
from gateway.api.answer_encoder import AnswerChoice
from gateway.edge.error_table import row_of
from gateway.errors import AnswerFailed
from gateway.models.catalog import Catalog
from gateway.store.errors import StoreError
from gateway.store.records import Attempt
from policies.fallback import FallbackOutcome, fallback_flow
from policies.types import Tier

_log = logging.getLogger("suffice.serving")

Item = tuple[AnswerChoice, TokenDelta]

# Most specific first: an overloaded backend is also an unavailable one.
_OUTCOMES: tuple[tuple[type[BackendError], FallbackOutcome], ...] = (
    (BackendOverloaded, FallbackOutcome.OVERLOADED),
    (BackendUnavailable, FallbackOutcome.UNAVAILABLE),
    (BackendTimeout, FallbackOutcome.TIMED_OUT),
    (ContextLengthExceeded, FallbackOutcome.TOO_LONG),
    (UnsupportedByBackend, FallbackOutcome.REJECTED),
    (RequestRejected, FallbackOutcome.REJECTED),
)


@dataclass(slots=True, eq=False)
class StartedAnswer:
    """The tier that answers, what came first (None where the answer is empty), and the rest."""

    tier: Tier
    first: Item | None
    rest: AsyncGenerator[Item, None]


async def start_answer(answer: Answer, catalog: Catalog) -> StartedAnswer:
    """Ask tier after tier until one begins to answer.

    Raises
    ------
    BackendError
        Every tier tried failed before its first token; of all failures the one the caller can do most about.
    """
    decision = answer.routed.decision
    try:
        return await call_tier(answer, catalog, catalog.ladder[decision.tier - 1])
    except BackendError as error:
        failures = [error]
    flow = fallback_flow(decision)
    next(flow)
    while True:
        try:
            attempt = flow.send(_outcome(failures[-1]))
        except StopIteration as end:
            decisive = failures[end.value.decisive]
            if failures[-1] is not decisive:
                _note_failure(answer, failures[-1])
            raise decisive from None
        _note_failure(answer, failures[-1])
        try:
            return await call_tier(answer, catalog, catalog.ladder[attempt.tier - 1])
        except BackendError as error:
            failures.append(error)


async def call_tier(answer: Answer, catalog: Catalog, tier: Tier) -> StartedAnswer:
    """Ask one tier, and wait until it begins to answer; the attempt is noted however it ends.

    Raises
    ------
    BackendError
        It failed before its first token.
    StoreUnavailable and its kinds
        What it may cost could not be made durable, so it was not asked.
    """
    clock = answer.routed.admitted.clock
    asked_s = clock()
    if answer.asked_s is None:
        answer.asked_s = asked_s
    answer.asked_tier = tier
    salt = catalog.cache_salt(answer.routed.admitted.caller.tenant)
    rest = _items(answer, tier, catalog.backend(tier), salt)
    try:
        first = await next_item(rest)
    except BackendError as error:
        failure = error
    except StoreError:
        # An answer that cannot be kept is worth asking nobody for.
        raise
    except Exception as error:
        # Whatever breaks inside a tier, the others may still answer.
        _log.exception("tier %d failed outside its contract", tier.index)
        failure = BackendFailure(f"Model {tier.model!r} failed: {type(error).__name__}.")
    else:
        answer.attempts.append(Attempt(tier.index, tier.model, clock() - asked_s))
        return StartedAnswer(tier, first, rest)
    failure.model = tier.model
    answer.attempts.append(Attempt(tier.index, tier.model, clock() - asked_s, error=row_of(failure).code))
    raise failure


async def next_item(items: AsyncGenerator[Item, None]) -> Item | None:
    """Return the next item; None where there is none."""
    try:
        # Not `anext(items, None)`: where the wait for it is cancelled, Python 3.11 leaves the generator running.
        return await items.__anext__()
    except StopAsyncIteration:
        return None


def _note_failure(answer: Answer, failure: BackendError) -> None:
    """Log a failure that the caller is not told of."""
    request_id, code = answer.routed.admitted.request_id, row_of(failure).code
    _log.warning("request %s: %s of model %r: %s", request_id, code, failure.model, failure)


def _outcome(failure: BackendError) -> FallbackOutcome:
    for kind, outcome in _OUTCOMES:
        if isinstance(failure, kind):
            return outcome
    return FallbackOutcome.FAILED


async def _items(answer: Answer, tier: Tier, backend: Backend, cache_salt: str) -> AsyncGenerator[Item, None]:
    """Yield new text of every choice until all have ended well; the first event fixes the tier.

    Raises
    ------
    BackendError
        Before the first event.
    AnswerFailed
        After it.
    StoreUnavailable and its kinds
        Before a call whose cost could not be made durable.
    """
    wants_logprobs = answer.request.sampling.logprobs is not None
    if answer.continued is None:
        answer.choices = [
            AnswerChoice(index, scored=[] if answer.is_scored else None, wants_logprobs=wants_logprobs)
            for index in range(answer.request.num_choices)
        ]
    choices = answer.choices
    answer.abandoned = {}
    requests = _generate_requests(answer, backend, cache_salt)
    if answer.hold is not None and answer.hold.max_attempts(tier):
        requests = await covered(answer.hold, tier, requests)
    clock = answer.routed.admitted.clock
    if len(requests) > 1:
        async with aclosing(merge([_stream(backend, request) for request in requests])) as merged:
            async for index, event in merged:
                choice = choices[index]
                if isinstance(event, Finished):
                    _take_ending(answer, tier, choice, event)
                else:
                    yield choice, _take_delta(answer, tier, choice, event, clock())
        return
    # The same for one choice, without a merge's tasks: nearly every request.
    choice = choices[0]
    events = _stream(backend, requests[0])
    try:
        async for event in events:
            if isinstance(event, Finished):
                _take_ending(answer, tier, choice, event)
            else:
                yield choice, _take_delta(answer, tier, choice, event, clock())
    finally:
        # As ``aclosing`` does, without its three calls.
        await events.aclose()


def _stream(backend: Backend, request: GenerateRequest) -> AsyncGenerator[Event, None]:
    # The protocol says "iterator" and "closing it frees everything": what can be closed is a generator.
    return cast("AsyncGenerator[Event, None]", backend.generate(request))


def _take_delta(answer: Answer, tier: Tier, choice: AnswerChoice, delta: TokenDelta, now_s: float) -> TokenDelta:
    """Note new tokens; return what of them is to be shown."""
    answer.tier = tier
    answer.last_token_s = now_s
    if answer.first_token_s is None:
        answer.first_token_s = now_s
    if choice.scored is not None:
        delta = choice.score(delta, is_wanted=answer.request.sampling.logprobs is not None)
    choice.num_tokens += delta.num_tokens
    if delta.text:
        choice.texts.append(delta.text)
    if delta.reasoning:
        choice.reasonings.append(delta.reasoning)
    if delta.signed:
        choice.sign(delta.signed)
    if delta.tool_calls:
        choice.call_pieces.extend(delta.tool_calls)
    if delta.logprobs:
        choice.logprobs.extend(delta.logprobs)
    return delta


def _take_ending(answer: Answer, tier: Tier, choice: AnswerChoice, ending: Finished) -> None:
    """Note how a choice ended.

    Raises
    ------
    BackendFailure
        It failed and nothing had come.
    AnswerFailed
        It failed after its first token.
    """
    is_failure = ending.reason in (FinishReason.ERROR, FinishReason.CANCELLED)
    if is_failure and answer.tier is None:
        raise BackendFailure(ending.error or f"Model {tier.model!r} ended before its first token.")
    answer.tier = tier
    choice.finished = ending
    if is_failure:
        raise AnswerFailed(ending.error or f"ended with {ending.reason.value!r}, no reason given", model=tier.model)


def _generate_requests(answer: Answer, backend: Backend, cache_salt: str) -> list[GenerateRequest]:
    """Make one generation per choice; each seed is the first one's plus the choice's place, so choices differ."""
    request, request_id = answer.request, answer.routed.admitted.request_id
    thinking = request.thinking
    if thinking is not None and "thinking" not in backend.capabilities:
        thinking = None
    num_choices = len(answer.choices)
    sampling = request.sampling
    asker = answer.routed.admitted.caller
    if answer.is_scored and sampling.logprobs is None and "logprobs" in backend.capabilities:
        sampling = replace(sampling, logprobs=0)
    prediction = request.prediction
    if answer.continued is not None:
        # What was thought and predicted belongs to the beginning.
        least = max(0, sampling.min_tokens - answer.num_written)
        sampling, prediction = replace(sampling, max_tokens=answer.num_left, min_tokens=least), None
        thinking = False if answer.continued.content and "thinking" in backend.capabilities else thinking
    generations = []
    for index in range(num_choices):
        if index and sampling.seed is not None and request.sampling.seed is not None:
            sampling = replace(sampling, seed=request.sampling.seed + index % request.n)
        generations.append(
            GenerateRequest(
                request_id if num_choices == 1 else f"{request_id}-{index}",
                sampling=sampling,
                priority=request.preferences.priority,
                thinking=thinking,
                echo=request.echo,
                extra={"cache_salt": cache_salt},
                on_abandoned=answer.note_abandoned(index),
                prediction=answer.predictions[index] if answer.predictions else prediction,
                caller=asker.key_id or asker.tenant,
                tools=request.tools,
                tool_choice=request.tool_choice,
                output_format=request.output_format,
                continued=answer.continued,
                **prompt_argument(request.prompts[index // request.n]),
            )
        )
    return generations
