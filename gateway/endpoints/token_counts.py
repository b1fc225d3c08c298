"""``/v1/messages/count_tokens`` as an ASGI application: read, resolve, count; no tier answers and nothing is logged."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import orjson

from gateway.access.key_permissions import bound_request
from gateway.access.rate_limiter import Reservation
from gateway.answering.request_router import RequestRouter
from gateway.api.messages_decoder import MessagesDecoder
from gateway.api.request import InferenceRequest
from gateway.edge.error_format import ANTHROPIC
from gateway.edge.error_table import answer_to
from gateway.edge.gate import OpenedRequest, RequestGate
from gateway.edge.json_body import parse_object
from gateway.edge.responder import Responder, Send
from gateway.edge.watchdog import Receive, Watchdog
from gateway.endpoints.generation import refuse
from gateway.errors import ClientGone, ClientStalled
from gateway.ids import uuid7
from gateway.observe.metrics import Metrics
from policies.types import EVERYTHING

_PATH = "/v1/messages/count_tokens"


class TokenCountEndpoint:
    """Answers with the tokens of a prompt. It counts as a request of its key, and moves no conversation.

    Parameters
    ----------
    decoder : of bodies that are counted
    gate, router, metrics : shared by all endpoints
    """

    def __init__(self, decoder: MessagesDecoder, gate: RequestGate, router: RequestRouter, metrics: Metrics) -> None:
        self._decoder = decoder
        self._gate = gate
        self._router = router
        self._metrics = metrics

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        watchdog = self._gate.watchdog(scope, receive)
        try:
            await self._respond(scope, receive, Responder(send, watchdog), watchdog)
        finally:
            watchdog.close()

    async def _respond(
        self, scope: MutableMapping[str, Any], receive: Receive, responder: Responder, watchdog: Watchdog
    ) -> None:
        request_id = uuid7()
        opened: OpenedRequest | None = None
        reservation: Reservation | None = None
        try:
            opened = await self._gate.open(scope, receive, watchdog)
            request: InferenceRequest = self._decoder(
                parse_object(opened.body, self._gate.limits.max_json_depth), opened.head.suffice
            )
            caller = opened.caller
            if caller.permissions is not EVERYTHING:
                request = bound_request(request, caller.permissions, self._router.catalog)
            if caller.is_limited:
                limiter = self._gate.rate_limiter
                reservation = await limiter.admit(request_id, caller, 0)
                limiter.settle(reservation, num_requests=1, num_tokens=0, cost_nano_usd=0, has_row=False)
            with watchdog.answering():
                count = await self._router.count_tokens(request, request_id, caller.tenant)
        except (ClientGone, ClientStalled):
            return
        except Exception as problem:
            error = problem if reservation is not None else await self._gate.charge(problem, request_id, opened)
            await refuse(error, request_id, responder, receive, ANTHROPIC)
            self._metrics.http[_PATH, str(answer_to(error, request_id).status)] += 1
            return
        headers = [
            (b"content-type", b"application/json"),
            *ANTHROPIC.id_headers(request_id),
            (b"x-suffice-count", b"exact" if count.is_exact else b"estimate"),
            *(reservation.headers if reservation is not None else ()),
        ]
        with suppress(ClientStalled):
            await responder.whole(200, headers, orjson.dumps({"input_tokens": count.num_tokens}))
        self._metrics.http[_PATH, "200"] += 1
