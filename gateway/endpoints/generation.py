"""The ASGI endpoint of everything that generates: read, admit, serve, commit, finish; and every way that can fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.access.admission import Admission
from gateway.access.authenticator import Authenticator, Caller
from gateway.access.rate_limiter import Grant, Rates
from gateway.answering import recording
from gateway.answering.cost_estimate import wanted_nano_usd, wanted_tokens
from gateway.answering.escalation import begin_surely
from gateway.answering.exchange import Exchange
from gateway.answering.service import Service
from gateway.answering.tier_calls import Item
from gateway.api import sse
from gateway.api.answer_encoder import Wire, WireHead, usage_json
from gateway.api.request import InferenceRequest
from gateway.api.stream_encoder import Frames
from gateway.config.sections import ServerConfig
from gateway.edge.body import Receive, discard_rest, parse_object, read_body
from gateway.edge.eager import Eager
from gateway.edge.error_table import answer_to, row_of
from gateway.edge.head import Head, read_head
from gateway.edge.responder import Responder, Send
from gateway.edge.watchdog import Hangup, Lifeline
from gateway.errors import BodyTooLarge, ClientGone, ClientStalled, Draining, QuotaExhausted
from gateway.ids import uuid7
from policies.pricing import to_nano_usd

_log = logging.getLogger("suffice.http")

# Frames of one write: a model that never waits must not keep its client waiting.
_MOST_TOGETHER = 64

Reader = Callable[[Mapping[str, Any], Mapping[str, str]], InferenceRequest]
"""Body and ``x-suffice-*`` headers in, checked request out."""


@dataclass(frozen=True, slots=True)
class Door:
    """What stands before every endpoint that costs something."""

    limits: ServerConfig
    authenticator: Authenticator
    admission: Admission
    rates: Rates


class GenerationEndpoint:
    """One path, as an ASGI application.

    Parameters
    ----------
    path : as the log names it
    reader, wire : how this endpoint's requests and responses look
    service, door : shared by all endpoints
    fingerprint : names the configuration in each response, as OpenAI's ``system_fingerprint``
    """

    def __init__(
        self, path: str, reader: Reader, wire: type[Wire], service: Service, door: Door, fingerprint: str
    ) -> None:
        self._path = path
        self._reader = reader
        self._wire = wire
        self._service = service
        self._door = door
        self._fingerprint = fingerprint

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        request_id = uuid7()
        responder = Responder(send, scope, self._door.limits.slow_client_timeout_s)
        try:
            head = read_head(scope["headers"])
            caller, request, accepted_s = await self._read(head, receive)
        except Exception as error:
            await refuse(error, request_id, self._path, responder, receive, self._service.metrics.reject)
            return
        exchange = Exchange(request_id, self._path, request, caller, head.traceparent, accepted_s)
        try:
            await self._admit(exchange, responder, receive, Hangup.of(scope))
        except asyncio.CancelledError:
            # The server gives up waiting: what was used is billed all the same, and a stream is not left looking whole.
            await self._service.settle_failure(exchange, Draining(), is_cancelled=True)
            await responder.error(answer_to(Draining(), request_id), recording.headers(exchange, with_cost=False))
            raise
        except Exception as error:
            await self._fail(exchange, error, responder)
        finally:
            if exchange.grant is not None:
                self._door.rates.settle(exchange.grant, **_used(exchange))
            # Only now: whoever waits for the last place to be left may close the log.
            if exchange.entered_s is not None:
                self._door.admission.leave(exchange.clock() - exchange.entered_s)
        self._service.metrics.http[self._path, str(responder.status or 499)] += 1

    async def _read(self, head: Head, receive: Receive) -> tuple[Caller, InferenceRequest, float]:
        """Everything that can be refused before a place is taken."""
        limits, door = self._door.limits, self._door
        begun_s = time.perf_counter()
        door.authenticator.check_origin(head.origin)
        caller = await door.authenticator.check(head.authorization)
        door.admission.check()
        asked_s = time.perf_counter()
        body = await read_body(receive, head.content_length, limits.max_body_bytes, limits.slow_client_timeout_s)
        # The time the client took to send is not the gateway's: the clock starts as if the body had been there.
        accepted_s = begun_s + (time.perf_counter() - asked_s)
        request = self._reader(parse_object(body, limits.max_json_depth), head.suffice)
        self._service.catalog.resolve(request.model)
        return caller, request, accepted_s

    async def _admit(self, exchange: Exchange, responder: Responder, receive: Receive, hangup: Hangup | None) -> None:
        limits, admission, rates = self._door.limits, self._door.admission, self._door.rates
        if exchange.caller.limits:
            exchange.grant = await rates.admit(exchange.request_id, exchange.caller, self._wanted_tokens(exchange))
        async with Lifeline(
            receive,
            timeout_s=limits.request_timeout_s,
            stall_timeout_s=limits.slow_client_timeout_s,
            hangup=hangup,
        ) as lifeline:
            began_s = exchange.clock()
            await admission.enter(exchange.request.preferences.priority)
            exchange.entered_s = exchange.clock()
            exchange.waited_s = exchange.entered_s - began_s
            await self._service.route(exchange)
            await self._afford(exchange)
            if exchange.request.stream:
                await self._stream(exchange, responder, lifeline)
            else:
                await self._whole(exchange, responder, lifeline)

    async def _afford(self, exchange: Exchange) -> None:
        """Hold what the request is expected to cost, where its key or its policy has a budget."""
        assert exchange.policy is not None, "the budget depends on the policy"
        if exchange.grant is None and exchange.policy.budget_usd_per_day is not None:
            exchange.grant = Grant(exchange.request_id, exchange.caller)
        if exchange.grant is not None:
            await self._door.rates.afford(exchange.grant, exchange.policy, self._wanted_nano_usd(exchange))

    def _wanted_tokens(self, exchange: Exchange) -> int:
        policy = self._service.catalog.resolve(exchange.request.model).policy
        return wanted_tokens(exchange.request, policy.expected_output_tokens)

    def _wanted_nano_usd(self, exchange: Exchange) -> int:
        assert exchange.decision is not None, "the price depends on the tier"
        assert exchange.policy is not None
        tier = self._service.catalog.ladder[exchange.decision.tier - 1]
        return wanted_nano_usd(exchange.request, tier, exchange.policy.expected_output_tokens)

    async def _whole(self, exchange: Exchange, responder: Responder, lifeline: Lifeline) -> None:
        begun = await begin_surely(exchange, self._service.catalog)
        async with aclosing(begun.rest) as items:
            async for _ in items:
                pass
        lifeline.let_go()
        await self._service.settle(exchange)
        wire = self._make_wire(exchange)
        choices = [wire.choice(answer) for answer in exchange.answers]
        body = wire.body(choices, usage_json(exchange.bill().shown_usage), recording.note(exchange))
        headers = [(b"content-type", b"application/json"), *recording.headers(exchange, with_cost=True)]
        await responder.whole(200, headers, body)

    async def _stream(self, exchange: Exchange, responder: Responder, lifeline: Lifeline) -> None:
        begun = await begin_surely(exchange, self._service.catalog)
        async with aclosing(begun.rest) as items:
            wire = self._make_wire(exchange)
            frames = Frames(wire)
            await responder.open_stream(recording.headers(exchange, with_cost=False))
            if begun.first is not None:
                frames.add(*begun.first)
            await self._pump(items, frames, responder, lifeline)
        lifeline.let_go()
        await self._service.settle(exchange)
        await responder.close_stream(self._last_frames(exchange, frames))

    async def _pump(
        self, items: AsyncGenerator[Item, None], frames: Frames, responder: Responder, lifeline: Lifeline
    ) -> None:
        """Send what comes as it comes; what is there together is sent together."""
        while True:
            step = Eager(anext(items, None))
            if frames.pending and (not step.is_done or len(frames.pending) >= _MOST_TOGETHER):
                try:
                    await responder.frames(frames.take(), lifeline)
                except BaseException:
                    await step.abandon()
                    raise
            item = step.result if step.is_done else await step.rest()
            if item is None:
                return
            frames.add(*item)

    def _last_frames(self, exchange: Exchange, frames: Frames) -> bytes:
        """What is left, how each choice ended, the counts and the cost; only ever made after the commit."""
        for answer in exchange.answers:
            frames.end(answer)
        note, last = recording.note(exchange), frames.take()
        if exchange.request.include_usage:
            last += frames.wire.usage_frame(usage_json(exchange.bill().shown_usage), note)
        else:
            last += sse.comment(orjson.dumps(note))
        return last + sse.DONE

    def _make_wire(self, exchange: Exchange) -> Wire:
        assert exchange.tier is not None, "only a tier that answers has a wire"
        head = WireHead(
            exchange.request_id, int(exchange.created_at.timestamp()), exchange.tier.model, self._fingerprint
        )
        request = exchange.request
        # The probabilities of an echoed prompt come with the ending, and belong before the answer's.
        holds_back = request.stream and request.echo and request.sampling.prompt_logprobs is not None
        return self._wire(head, include_usage=request.include_usage, holds_back=holds_back)

    async def _fail(self, exchange: Exchange, error: Exception, responder: Responder) -> None:
        """One ending for every failure after admission: a row if a decision was made, an answer if someone listens."""
        row = row_of(error)
        _report(error, exchange.request_id)
        is_refused = isinstance(error, QuotaExhausted)
        if not is_refused and (exchange.decision is not None or row.status >= 500 or row.status == 499):
            await self._service.settle_failure(exchange, error, is_cancelled=row.status == 499)
        else:
            self._service.metrics.reject(self._path, answer_to(error, exchange.request_id).code)
        if not isinstance(error, ClientGone | ClientStalled):
            await responder.error(answer_to(error, exchange.request_id), recording.headers(exchange, with_cost=False))


def _used(exchange: Exchange) -> dict[str, int]:
    """What a limited key's request really used: what its row says, and nothing where it left none."""
    if not exchange.settled:
        return {"num_requests": 0, "num_tokens": 0, "cost_nano_usd": 0}
    bill = exchange.bill()
    num_tokens = bill.usage.prompt_tokens + bill.usage.completion_tokens
    return {"num_requests": 1, "num_tokens": num_tokens, "cost_nano_usd": to_nano_usd(bill.cost_usd)}


async def refuse(
    error: Exception,
    request_id: str,
    path: str,
    responder: Responder,
    receive: Receive,
    count: Callable[[str, str], None],
) -> None:
    """Answer a request that was not admitted: no place, no decision, no row."""
    answer = answer_to(error, request_id)
    _report(error, request_id)
    count(path, answer.code)
    if isinstance(error, ClientGone):
        return
    own_headers = [(b"x-suffice-request-id", request_id.encode()), (b"x-request-id", request_id.encode())]
    headers = [*answer.headers(), *own_headers]
    if isinstance(error, BodyTooLarge):
        await _refuse_upload(responder, answer.status, headers, answer.json(), receive)
    else:
        await responder.error(answer, own_headers)


async def _refuse_upload(
    responder: Responder, status: int, headers: list[tuple[bytes, bytes]], body: bytes, receive: Receive
) -> None:
    """Answer first, then take what is still coming for a moment, then close."""
    await responder.begin(status, [*headers, (b"connection", b"close")], body)
    await discard_rest(receive)
    await responder.finish()


def _report(error: Exception, request_id: str) -> None:
    """Log a failure at its row's level; with its traceback only where it is our own fault."""
    row = row_of(error)
    if row.log_level >= logging.ERROR:
        _log.error("request %s failed", request_id, exc_info=error)
    elif row.log_level > logging.INFO:
        _log.warning("request %s: %s: %s", request_id, row.code, error)
