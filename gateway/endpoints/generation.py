"""The ASGI endpoint of everything that generates: open, decode, admit, route, answer, commit; and every way to fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any

from backends.errors import BackendRefused, RequestRejected
from gateway.access.bulkhead import PlaceClaim
from gateway.access.key_permissions import bound_request
from gateway.access.rate_limiter import Reservation
from gateway.access.spending_lease import SpendingHold, SpendingLease
from gateway.answering.cost_estimate import wanted_nano_usd, wanted_tokens
from gateway.answering.escalation import start_confident_answer
from gateway.answering.explanation import answer_headers, answer_note
from gateway.answering.phases import AdmittedRequest, Answer, Bill, RoutedRequest
from gateway.answering.recorder import AnswerRecorder
from gateway.answering.request_router import RequestRouter
from gateway.answering.resumption import resume_answer
from gateway.answering.tier_caller import StartedAnswer, start_answer
from gateway.api.answer_encoder import AnswerEncoder, AnswerEnd, ResponseHead
from gateway.api.conversation import read_conversation
from gateway.api.request import InferenceRequest
from gateway.edge.error_format import OPENAI, ErrorFormat, error_format
from gateway.edge.error_table import ErrorAnswer, answer_to, is_callers_fault, row_of
from gateway.edge.gate import OpenedRequest, RequestGate, discard_rest
from gateway.edge.json_body import parse_object
from gateway.edge.responder import Responder, Send
from gateway.edge.stream_pinger import StreamPinger
from gateway.edge.watchdog import Receive, Watchdog
from gateway.errors import AnswerFailed, BodyTooLarge, ClientGone, ClientStalled, Draining, QueueFull, QuotaExhausted
from gateway.ids import uuid7
from gateway.observe.metrics import Metrics
from gateway.observe.refusal_log import Refusal
from gateway.store.committer import GroupCommitter
from gateway.store.errors import StoreUnavailable
from gateway.store.records import ResponseRecord
from policies.pricing import to_nano_usd
from policies.types import EVERYTHING

_log = logging.getLogger("suffice.http")

Decoder = Callable[[Mapping[str, Any], Mapping[str, str]], InferenceRequest]
"""Body and ``x-suffice-*`` headers in, checked request out."""


class GenerationEndpoint:
    """One path of one protocol, as an ASGI application.

    Parameters
    ----------
    path : as the log names it
    decoder, encoder : the protocol's codec
    gate, router, recorder, metrics : shared by all endpoints
    fingerprint : names the configuration in each response, as OpenAI's ``system_fingerprint``
    log : asked whether it takes rows before anything is spent
    lease : covers calls to priced remote models; None where there are none
    """

    def __init__(
        self,
        path: str,
        decoder: Decoder,
        encoder: type[AnswerEncoder],
        gate: RequestGate,
        router: RequestRouter,
        recorder: AnswerRecorder,
        metrics: Metrics,
        fingerprint: str,
        log: GroupCommitter,
        lease: SpendingLease | None = None,
    ) -> None:
        self.path = path
        self.lease = lease
        self.log = log
        self.encoder = encoder
        self.gate = gate
        self.router = router
        self.recorder = recorder
        self.metrics = metrics
        self.fingerprint = fingerprint
        self.error_format = error_format(path)
        self._decoder = decoder

    notes_refusals = True
    """By itself: it is reached past the application's layers, and knows which of its errors have a row."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        watchdog = self.gate.watchdog(scope, receive)
        try:
            await self._respond(scope, receive, Responder(send, watchdog), watchdog)
        finally:
            watchdog.close()

    async def _respond(
        self, scope: MutableMapping[str, Any], receive: Receive, responder: Responder, watchdog: Watchdog
    ) -> None:
        request_id, gate = uuid7(), self.gate
        opened: OpenedRequest | None = None
        try:
            opened = await gate.open(scope, receive, watchdog)
            request = await self.decode(opened, watchdog)
            permissions = opened.caller.permissions
            if permissions is EVERYTHING:
                self.router.catalog.resolve(request.model)
            else:
                request = bound_request(request, permissions, self.router.catalog)
        except Exception as problem:
            error = await gate.charge(problem, request_id, opened)
            told = answer_to(error, request_id, self.error_format)
            self.note_refusal(told, request_id, scope.get("suffice.key_id"))
            await refuse(error, request_id, responder, receive, self.error_format)
            return
        admitted = AdmittedRequest(
            request_id,
            self.path,
            request,
            opened.caller,
            opened.head.traceparent,
            opened.accepted_s,
            conversation=read_conversation(request, opened.head.session, opened.caller.tenant),
        )
        await GenerationRun(self, admitted, responder, watchdog).run()
        self.metrics.http[self.path, str(responder.status or 499)] += 1

    async def decode(self, opened: OpenedRequest, watchdog: Watchdog) -> InferenceRequest:
        """Return what a body asks for.

        Raises
        ------
        InvalidRequest and its kinds
        """
        return self._decoder(parse_object(opened.body, self.gate.limits.max_json_depth), opened.head.suffice)

    def kept_response(self, encoder: AnswerEncoder, routed: RoutedRequest) -> ResponseRecord | None:
        """Return what is kept of an answer that was just encoded to its end, beside its row: nothing."""
        return None

    def note_refusal(self, told: ErrorAnswer, request_id: str, key_id: str | None) -> None:
        """Note a request that ends without a row."""
        refusal = Refusal("POST", self.path, self.path, told.status, told.code, request_id, key_id)
        self.gate.refusals.note(refusal)


class GenerationRun:
    """One admitted request on its way to its one ending."""

    __slots__ = ("_admitted", "_answer", "_endpoint", "_is_refusal", "_pinger", "_place", "_responder", "_watchdog")

    def __init__(
        self, endpoint: GenerationEndpoint, admitted: AdmittedRequest, responder: Responder, watchdog: Watchdog
    ) -> None:
        self._endpoint = endpoint
        self._admitted = admitted
        self._responder = responder
        self._watchdog = watchdog
        self._answer: Answer | None = None
        self._place: PlaceClaim | None = None
        self._pinger: StreamPinger | None = None
        self._is_refusal = False

    async def run(self) -> None:
        """Answer, or tell why not; whatever happens the place and the budget are given back."""
        admitted, endpoint = self._admitted, self._endpoint
        try:
            if admitted.caller.is_limited:
                await self._reserve()
            with self._watchdog.answering():
                try:
                    if admitted.request.stream:
                        self._keep_alive()
                    await self._answer_in_turn()
                finally:
                    # Before the watchdog's phase ends: a ping has the client watched.
                    if self._pinger is not None:
                        self._pinger.close()
        except asyncio.CancelledError:
            # The server gives up waiting: what was used is billed all the same, and a stream is not left looking whole.
            await endpoint.recorder.settle_failure(admitted, self._answer, Draining(), is_cancelled=True)
            await self._tell(Draining())
            raise
        except Exception as error:
            await self._fail(error)
        finally:
            if admitted.reservation is not None:
                self._settle_budget(admitted.reservation)
            # Only now: whoever waits for the last place to be left may close the log.
            if self._place is not None:
                endpoint.gate.admission.leave(self._place)

    async def _answer_in_turn(self) -> None:
        """Route, wait for a place at the model, and answer."""
        admitted, endpoint = self._admitted, self._endpoint
        routed = await self._route()
        await self._take_place(routed)
        if admitted.waited_s and not endpoint.router.is_current(routed):
            # It keeps the place it has, as a request that falls back does.
            routed = await self._route()
        # An answer that cannot be logged is withheld, so nothing is spent on one.
        if not endpoint.log.is_well:
            await endpoint.log.check()
        hold = None if endpoint.lease is None else SpendingHold(endpoint.lease)
        answer = self._answer = Answer(routed, admitted.request, hold=hold)
        if admitted.reservation is not None or routed.basis.policy.budget_usd_per_day is not None:
            await self._afford(routed)
        start = start_confident_answer if routed.decision.escalation_path else start_answer
        try:
            started = await start(answer, endpoint.router.catalog)
        except AnswerFailed as failure:
            # While it was held.
            started = await resume_answer(answer, endpoint.router, failure, is_held=admitted.request.stream)
        send = self._stream if admitted.request.stream else self._whole
        await send(answer, started)

    def _keep_alive(self) -> None:
        """Ping the client while its stream is silent: waiting for a place, for a first token, or between tokens."""
        every_s, ping = self._endpoint.gate.limits.sse_ping_s, self._endpoint.encoder.ping
        if every_s and ping:
            self._pinger = StreamPinger(self._responder, every_s, ping, self._early_headers)

    def _early_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of a stream that begins with a ping; who answers is said at its end."""
        self._responder.encode_error = self._make_encoder(self._admitted.request.model).error_event
        return answer_headers(self._admitted, None, with_cost=False)

    async def _route(self) -> RoutedRequest:
        admitted, endpoint = self._admitted, self._endpoint
        began_s = admitted.clock()
        routed = await endpoint.router.route(admitted)
        endpoint.metrics.routing_s.observe(admitted.clock() - began_s)
        return routed

    async def _take_place(self, routed: RoutedRequest) -> None:
        """Take places of what computes the tier's answers; raises ``QueueFull``, ``Draining``."""
        admitted, endpoint = self._admitted, self._endpoint
        request, began_s = admitted.request, admitted.clock()
        model = endpoint.router.catalog.ladder[routed.decision.tier - 1].model
        place = self._place = await endpoint.gate.admission.enter(
            request.preferences.priority, admitted.caller, model, request.num_choices
        )
        if place.turn is not None:
            admitted.waited_s = admitted.clock() - began_s

    async def _whole(self, answer: Answer, started: StartedAnswer) -> None:
        while True:
            try:
                async with aclosing(started.rest) as items:
                    async for _ in items:
                        pass
                break
            except AnswerFailed as failure:
                started = await resume_answer(answer, self._endpoint.router, failure)
        self._watchdog.let_go()
        encoder = self._make_encoder(started.tier.model)
        body = encoder.whole(_end_of(answer, started))
        await self._settle(answer, encoder)
        headers = [(b"content-type", b"application/json"), *answer_headers(self._admitted, answer, with_cost=True)]
        await self._responder.whole(200, headers, body)

    async def _stream(self, answer: Answer, started: StartedAnswer) -> None:
        encoder = self._make_encoder(started.tier.model)
        self._responder.encode_error = encoder.error_event
        is_open = False
        while True:
            try:
                async with aclosing(started.rest) as items:
                    if not is_open:
                        await self._responder.open_stream(answer_headers(self._admitted, answer, with_cost=False))
                        is_open = True
                    if started.first is not None:
                        await self._responder.frames(encoder.add(*started.first))
                    async for choice, delta in items:
                        await self._responder.frames(encoder.add(choice, delta))
                break
            except AnswerFailed as failure:
                started = await resume_answer(answer, self._endpoint.router, failure)
        # The commit takes no time worth a ping, and must not be interrupted for a client that takes none.
        if self._pinger is not None:
            self._pinger.stop()
        self._watchdog.let_go()
        last = encoder.end(_end_of(answer, started))
        await self._settle(answer, encoder)
        await self._responder.close_stream(last)

    async def _settle(self, answer: Answer, encoder: AnswerEncoder) -> None:
        """Commit the row of an answer whose end is encoded; only then may that be sent."""
        endpoint = self._endpoint
        await endpoint.recorder.settle(answer, endpoint.kept_response(encoder, answer.routed))

    def _make_encoder(self, model: str) -> AnswerEncoder:
        admitted, endpoint = self._admitted, self._endpoint
        head = ResponseHead(
            admitted.request_id,
            int(admitted.created_at.timestamp()),
            model,
            endpoint.fingerprint,
            None if self._answer is None else self._answer.routed.facts.num_prompt_tokens,
        )
        return endpoint.encoder(head, admitted.request)

    async def _reserve(self) -> None:
        """Reserve requests and tokens of a limited key."""
        admitted, endpoint = self._admitted, self._endpoint
        policy = endpoint.router.catalog.resolve(admitted.request.model).policy
        num_tokens = wanted_tokens(admitted.request, policy.expected_output_tokens)
        admitted.reservation = await endpoint.gate.rate_limiter.admit(admitted.request_id, admitted.caller, num_tokens)

    async def _afford(self, routed: RoutedRequest) -> None:
        """Reserve what the request is expected to cost, where its key or its policy has a budget."""
        admitted, endpoint, policy = self._admitted, self._endpoint, routed.basis.policy
        if admitted.reservation is None:
            admitted.reservation = Reservation(admitted.request_id, admitted.caller)
        tier = endpoint.router.catalog.ladder[routed.decision.tier - 1]
        cost = wanted_nano_usd(admitted.request, tier, policy.expected_output_tokens)
        await endpoint.gate.rate_limiter.afford(admitted.reservation, policy, cost)

    def _settle_budget(self, reservation: Reservation) -> None:
        """Replace what was reserved by what the row says was used.

        Without a row it is one request where the caller was at fault, for finding that out is work; else nothing.
        """
        settle = self._endpoint.gate.rate_limiter.settle
        if not self._admitted.is_settled:
            num_requests = int(self._is_refusal)
            settle(reservation, num_requests=num_requests, num_tokens=0, cost_nano_usd=0, has_row=False)
            return
        bill = Bill() if self._answer is None else self._answer.bill()
        num_tokens = bill.usage.prompt_tokens + bill.usage.completion_tokens
        settle(reservation, num_requests=1, num_tokens=num_tokens, cost_nano_usd=to_nano_usd(bill.cost_usd))

    async def _fail(self, error: Exception) -> None:
        """Take the one ending of a failure after admission: a row if it was routed, an answer if someone listens."""
        admitted, row = self._admitted, row_of(error)
        report(error, admitted.request_id)
        # Where the log is down before anything was asked for, it takes no row of that either.
        is_unlogged = isinstance(error, StoreUnavailable) and (self._answer is None or self._answer.is_unasked)
        is_refused = is_unlogged or isinstance(error, QuotaExhausted | QueueFull)
        if not is_refused and (self._answer is not None or row.status >= 500 or row.status == 499):
            await self._endpoint.recorder.settle_failure(admitted, self._answer, error, is_cancelled=row.status == 499)
        else:
            self._is_refusal = is_callers_fault(error)
            told = answer_to(error, admitted.request_id, self._endpoint.error_format)
            self._endpoint.note_refusal(told, admitted.request_id, admitted.caller.key_id)
        if not isinstance(error, ClientGone | ClientStalled):
            await self._tell(error)

    async def _tell(self, error: Exception) -> None:
        """Tell the client of an error."""
        admitted = self._admitted
        told = answer_to(error, admitted.request_id, self._endpoint.error_format)
        await self._responder.error(told, answer_headers(admitted, self._answer, with_cost=False))


def _end_of(answer: Answer, started: StartedAnswer) -> AnswerEnd:
    """Return what is told of an answer at its end; the last call for its bill, so after its last event."""
    return AnswerEnd(answer.choices, answer.bill().shown_usage, answer_note(answer, started.tier))


async def refuse(
    error: Exception,
    request_id: str,
    responder: Responder,
    receive: Receive,
    shape: ErrorFormat = OPENAI,
) -> None:
    """Answer a request that was not admitted: no place, no decision, no row."""
    answer = answer_to(error, request_id, shape)
    report(error, request_id)
    if isinstance(error, ClientGone):
        return
    own_headers = shape.id_headers(request_id)
    if isinstance(error, BodyTooLarge):
        # Answer first, then take what is still coming for a moment, then close.
        headers = [*answer.headers(), *own_headers, (b"connection", b"close")]
        await responder.begin(answer.status, headers, answer.json())
        await discard_rest(receive)
        await responder.finish()
    else:
        await responder.error(answer, own_headers)


def report(error: Exception, request_id: str) -> None:
    """Log a failure at its row's level, where it is not in full what the caller is told.

    With its traceback only where it is our own fault.
    """
    row = row_of(error)
    if row.log_level < logging.WARNING and row.is_public:
        return
    is_remote = isinstance(error, BackendRefused | RequestRejected)
    if row.log_level >= logging.ERROR and not is_remote:
        _log.error("request %s failed", request_id, exc_info=error)
        return
    model = getattr(error, "model", None)
    _log.log(
        row.log_level, "request %s: %s%s: %s", request_id, row.code, f" of model {model!r}" if model else "", error
    )
