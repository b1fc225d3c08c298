"""``/v1/embeddings`` as an ASGI application: read, admit, embed, answer."""

from __future__ import annotations

import array
import base64
import sys
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from backends.errors import BackendError
from backends.protocol import Backend, EmbedResult, FinishReason, Priority
from gateway.access.authenticator import Caller
from gateway.access.call_cost import most_reading_nano_usd
from gateway.access.rate_limiter import Reservation
from gateway.access.spending_lease import SpendingHold, SpendingLease
from gateway.answering.recorder import AnswerRecorder
from gateway.api.embedding_decoder import EmbeddingRequest, decode_embedding_request
from gateway.edge.error_table import answer_to, is_callers_fault
from gateway.edge.gate import OpenedRequest, RequestGate
from gateway.edge.json_body import parse_object
from gateway.edge.responder import Responder, Send
from gateway.edge.watchdog import Receive, Watchdog
from gateway.endpoints.generation import refuse
from gateway.errors import ClientGone, ClientStalled, UnsupportedOption
from gateway.ids import uuid7
from gateway.models.catalog import Catalog
from gateway.observe.metrics import Metrics
from gateway.store.committer import GroupCommitter
from policies.pricing import embedding_price_usd, from_nano_usd, to_nano_usd
from policies.types import Tier

_PATH = "/v1/embeddings"
_CHARS_PER_TOKEN = 4


class EmbeddingEndpoint:
    """Answers with vectors. They need no routing; their row says who asked, for what, and what it took and cost.

    They count against their key's budgets, and no policy's. ``lease`` covers calls to priced remote models.
    """

    def __init__(
        self,
        gate: RequestGate,
        catalog: Catalog,
        recorder: AnswerRecorder,
        metrics: Metrics,
        log: GroupCommitter,
        lease: SpendingLease | None = None,
    ) -> None:
        self._log = log
        self._lease = lease
        self._gate = gate
        self._catalog = catalog
        self._recorder = recorder
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
        request_id, created_at = uuid7(), datetime.now(UTC)
        reservation: Reservation | None = None
        opened: OpenedRequest | None = None
        num_tokens, cost_nano_usd, num_requests, has_row = 0, 0, 0, False
        hold = None if self._lease is None else SpendingHold(self._lease)
        try:
            opened = await self._gate.open(scope, receive, watchdog)
            body = parse_object(opened.body, self._gate.limits.max_json_depth)
            request, caller = decode_embedding_request(body, opened.head.suffice), opened.caller
            if caller.is_limited:
                reservation = await self._gate.rate_limiter.admit(request_id, caller, _wanted_tokens(request))
            model, backend = self._catalog.embedder(request.model, request.regions, caller.permissions)
            tier = self._catalog.embedding_tier(model)
            if reservation is not None:
                wanted = to_nano_usd(embedding_price_usd(tier, _wanted_tokens(request)))
                await self._gate.rate_limiter.afford(reservation, None, wanted)
            result = await self._embed(request, caller, watchdog, tier, backend, hold)
            vectors = _shown(_fit(request, result), request.as_base64)
            num_tokens = result.usage.prompt_tokens
            cost_nano_usd = to_nano_usd(embedding_price_usd(tier, num_tokens))
            await self._recorder.settle_embedding(
                request_id,
                request,
                caller,
                created_at,
                model_served=model,
                prompt_tokens=num_tokens,
                cost_usd=from_nano_usd(cost_nano_usd),
                total_s=time.perf_counter() - opened.accepted_s,
                finish_reason=FinishReason.STOP,
                status_code=200,
            )
            num_requests, has_row = 1, True
        except (ClientGone, ClientStalled):
            num_requests = 1
            return
        except Exception as problem:
            error = problem
            if reservation is not None:
                num_requests = int(is_callers_fault(error))
            else:
                error = await self._gate.charge(error, request_id, opened)
            await refuse(error, request_id, responder, receive)
            self._metrics.http[_PATH, str(answer_to(error, request_id).status)] += 1
            return
        finally:
            if hold is not None:
                hold.settle()
            if reservation is not None:
                self._gate.rate_limiter.settle(
                    reservation,
                    num_requests=num_requests,
                    num_tokens=num_tokens if has_row else 0,
                    cost_nano_usd=cost_nano_usd if has_row else 0,
                    has_row=has_row,
                )
        answer = {
            "object": "list",
            "data": [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(vectors)],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        headers = [
            (b"content-type", b"application/json"),
            (b"x-suffice-request-id", request_id.encode()),
            (b"x-suffice-cost", format(from_nano_usd(cost_nano_usd), "f").encode()),
        ]
        if reservation is not None:
            headers += reservation.headers
        with suppress(ClientStalled):
            await responder.whole(200, headers, orjson.dumps(answer))
        self._metrics.http[_PATH, "200"] += 1

    async def _embed(
        self,
        request: EmbeddingRequest,
        caller: Caller,
        watchdog: Watchdog,
        tier: Tier,
        backend: Backend,
        hold: SpendingHold | None,
    ) -> EmbedResult:
        admission = self._gate.admission
        with watchdog.answering():
            claim = await admission.enter(Priority.LIVE, caller, tier.model)
            try:
                if not self._log.is_well:
                    await self._log.check()
                if hold is not None and (most_attempts := hold.max_attempts(tier)):
                    await hold.cover(most_attempts * most_reading_nano_usd(tier, *request.texts))
                return await backend.embed(request.texts)
            except BackendError as error:
                error.model = tier.model
                raise
            finally:
                admission.leave(claim)


def _wanted_tokens(request: EmbeddingRequest) -> int:
    return sum(len(text) // _CHARS_PER_TOKEN + 1 for text in request.texts)


def _fit(request: EmbeddingRequest, result: EmbedResult) -> Sequence[Sequence[float]]:
    """The vectors, refusing a width the model does not have: cutting an ordinary vector short breaks its geometry."""
    width = len(result.vectors[0])
    if request.dimensions not in (None, width):
        raise UnsupportedOption(
            f"'dimensions' is {request.dimensions}; the vectors of this model have {width}.", param="dimensions"
        )
    return result.vectors


def _shown(vectors: Sequence[Sequence[float]], as_base64: bool) -> list[Any]:
    if not as_base64:
        return [list(vector) for vector in vectors]
    return [base64.b64encode(_little_endian(vector)).decode() for vector in vectors]


def _little_endian(vector: Sequence[float]) -> bytes:
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
